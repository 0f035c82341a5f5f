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

refuse() {
  echo "error: $1" >&2
  exit 2
}
check_number() { [[ ${!1} =~ ^[1-9][0-9]*$ ]] || refuse "$1=${!1} is not a number above 0"; }
[[ $NAME =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  refuse "NAME=$NAME is no name in Kubernetes: up to 40 of a-z, 0-9 and -, the first a letter, the last not -"

# GPUs: hosts, and GPUs of each.
# TPUs: a slice, as GKE names it, and the chips of each host; the number of hosts follows.
case $kind in
gpu)
  HOSTS=${HOSTS:-1}
  GPUS=${GPUS:-8}
  check_number HOSTS
  check_number GPUS
  ;;
tpu)
  ACCELERATOR=${ACCELERATOR:-tpu-v5-lite-podslice}
  TOPOLOGY=${TOPOLOGY:-4x4}
  CHIPS=${CHIPS:-4}
  check_number CHIPS
  [[ $TOPOLOGY =~ ^[1-9][0-9]*(x[1-9][0-9]*)+$ ]] || refuse "TOPOLOGY=$TOPOLOGY is not like 4x4 or 2x2x2"
  slice=$((${TOPOLOGY//x/*}))
  [ $((slice % CHIPS)) -eq 0 ] || refuse "TOPOLOGY=$TOPOLOGY has $slice chips, which CHIPS=$CHIPS a host do not divide"
  HOSTS=$((slice / CHIPS))
  ;;
esac

ARGUMENTS=
for argument in "$@"; do # as YAML's double-quoted strings, in which $$ is Kubernetes' way to write $
  argument=${argument//\\/\\\\}
  argument=${argument//\"/\\\"}
  argument=${argument//$'\n'/\\n}
  ARGUMENTS+=", \"${argument//\$/\$\$}\""
done
ARGUMENTS=${ARGUMENTS#, }

manifest=$(<"$(dirname "$0")/jobset_$kind.yaml")
for name in "${names[@]}"; do
  manifest=${manifest//"\${$name}"/"${!name}"}
done
printf '%s\n' "$manifest"
