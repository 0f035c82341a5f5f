#!/usr/bin/env bash
# Prints a JobSet for Kubernetes: jobset_gpu.yaml or jobset_tpu.yaml, with these variables filled in.
#
#   IMAGE=registry/name:tag CLAIM=runs HOSTS=2 launch/jobset.sh gpu --config gpt2_124m --mesh.data -1 | kubectl apply -f -
#
# What follows `gpu` or `tpu` is given to `transformers-jax train`. The cluster needs JobSet (jobset.sigs.k8s.io).
set -euo pipefail

kind=${1:-}
case $kind in
gpu) names=(NAME IMAGE CLAIM HOSTS GPUS ARGUMENTS) ;;
tpu) names=(NAME IMAGE CLAIM HOSTS ACCELERATOR TOPOLOGY CHIPS ARGUMENTS) ;;
*)
  echo "usage: launch/jobset.sh gpu|tpu --config NAME [OPTIONS of transformers-jax train]" >&2
  exit 2
  ;;
esac
shift
if [ $# -eq 0 ]; then
  echo "error: --config NAME is missing after $kind" >&2
  exit 2
fi

# Of both.
: "${IMAGE:?set IMAGE to an image that launch/Dockerfile made, in a registry that the cluster can read}"
: "${CLAIM:?set CLAIM to a PersistentVolumeClaim that all hosts can write at once (ReadWriteMany)}"
NAME=${NAME:-train} # of the JobSet, and of the run's directory on the claim

# GPUs: hosts, and GPUs of each.
# TPUs: a slice, as GKE names it, and the chips of each host; the number of hosts follows.
case $kind in
gpu)
  HOSTS=${HOSTS:-1}
  GPUS=${GPUS:-8}
  ;;
tpu)
  ACCELERATOR=${ACCELERATOR:-tpu-v5-lite-podslice}
  TOPOLOGY=${TOPOLOGY:-4x4}
  CHIPS=${CHIPS:-4}
  slice=$((${TOPOLOGY//x/*}))
  if [ $((slice % CHIPS)) -ne 0 ]; then
    echo "error: TOPOLOGY=$TOPOLOGY has $slice chips, which CHIPS=$CHIPS a host do not divide" >&2
    exit 2
  fi
  HOSTS=$((slice / CHIPS))
  ;;
esac

ARGUMENTS=
for argument in "$@"; do # as YAML's double-quoted strings, in which $$ is Kubernetes' way to write $
  argument=${argument//\\/\\\\}
  argument=${argument//\"/\\\"}
  ARGUMENTS+=", \"${argument//\$/\$\$}\""
done
ARGUMENTS=${ARGUMENTS#, }

manifest=$(<"$(dirname "$0")/jobset_$kind.yaml")
for name in "${names[@]}"; do
  manifest=${manifest//"\${$name}"/"${!name}"}
done
printf '%s\n' "$manifest"
