#!/usr/bin/env bash
# A training on a Cloud TPU slice, with one process on each of its hosts; from the repository's root, with gcloud logged in:
#
#   export TPU=my-pod ZONE=us-west4-a SHARE=10.0.0.2:/runs
#   launch/tpu_pod.sh create
#   launch/tpu_pod.sh install
#   launch/tpu_pod.sh train --config gpt2_124m --mesh.data -1
#   launch/tpu_pod.sh log      # of the first host, until Ctrl-C, which leaves the training alone
#   launch/tpu_pod.sh stop     # saves; `train` goes on
#   launch/tpu_pod.sh delete
#
# JAX finds the processes by the metadata of the hosts. After SPOT=1 hosts were taken away: delete, create, install and
# train as before, and the run goes on from its last checkpoint, which lies on SHARE.
set -euo pipefail

TPU=${TPU:?set TPU to a name for the slice}
ZONE=${ZONE:?set ZONE to a zone that has the TPUs, such as us-west4-a}
SHARE=${SHARE:?set SHARE to an NFS export that the hosts can write, such as 10.0.0.2:/runs of Filestore}
TYPE=${TYPE:-v5litepod-16}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5-lite}
SPOT=${SPOT:-} # 1: cheaper hosts that may be taken away at any time, from a queue
COMMIT=${COMMIT:-HEAD}

tpus=(gcloud compute tpus)
on_all() { "${tpus[@]}" tpu-vm ssh "$TPU" --zone "$ZONE" --worker all --command "$1"; }

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
create)
  if [ -z "$SPOT" ]; then
    "${tpus[@]}" tpu-vm create "$TPU" --zone "$ZONE" --accelerator-type "$TYPE" --version "$RUNTIME"
  else
    "${tpus[@]}" queued-resources create "$TPU" --node-id "$TPU" --zone "$ZONE" --accelerator-type "$TYPE" \
      --runtime-version "$RUNTIME" --spot
    while true; do
      state=$("${tpus[@]}" queued-resources describe "$TPU" --zone "$ZONE" --format 'value(state.state)')
      echo "$TPU is $state"
      case $state in
      ACTIVE) break ;;
      FAILED | SUSPENDING | SUSPENDED) exit 1 ;;
      esac
      sleep "${POLL_SECONDS:-30}"
    done
  fi
  ;;
install)
  archive=$(mktemp -d)/transformers_jax.tar.gz
  git archive --format tar.gz --output "$archive" "$COMMIT"
  "${tpus[@]}" tpu-vm scp "$archive" "$TPU:transformers_jax.tar.gz" --zone "$ZONE" --worker all
  rm -r "$(dirname "$archive")"
  # The hosts' own Python is older than 3.11; uv brings one.
  on_all "set -e
rm -rf transformers_jax && mkdir transformers_jax && tar -xzf transformers_jax.tar.gz -C transformers_jax
python3 -m pip install --quiet --user uv
cd transformers_jax && python3 -m uv venv --quiet --python 3.12 .venv
python3 -m uv pip install --quiet --python .venv/bin/python '.[tpu,hub,metrics]'
sudo mkdir -p /mnt/runs
mountpoint -q /mnt/runs || { sudo apt-get install -y -q nfs-common && sudo mount -t nfs '$SHARE' /mnt/runs; }
sudo chmod a+rwx /mnt/runs || true # an export that root may not change may be open already"
  ;;
train)
  [ $# -gt 0 ] || { echo "error: --config NAME is missing after train" >&2; exit 2; }
  # Later settings win, so that another --workdir may be given.
  on_all "cd transformers_jax && PATH=\$PWD/.venv/bin:\$PATH &&
{ nohup transformers-jax train --workdir /mnt/runs/$(printf '%q ' "$TPU" "$@") >../train.log 2>&1 </dev/null & }"
  ;;
log)
  "${tpus[@]}" tpu-vm ssh "$TPU" --zone "$ZONE" --worker 0 --command "tail -n 100 -f train.log"
  ;;
stop)
  on_all "pkill -TERM -f '[t]ransformers-jax train' || true"
  ;;
delete)
  if [ -z "$SPOT" ]; then
    "${tpus[@]}" tpu-vm delete "$TPU" --zone "$ZONE" --quiet
  else
    "${tpus[@]}" queued-resources delete "$TPU" --zone "$ZONE" --force --quiet
  fi
  ;;
*)
  echo "usage: launch/tpu_pod.sh create|install|train|log|stop|delete" >&2
  exit 2
  ;;
esac
