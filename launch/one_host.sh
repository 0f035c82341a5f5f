#!/usr/bin/env bash
# A training on one host with a process for each GPU:
#
#   GPUS=8 launch/one_host.sh --config gpt2_124m --mesh.fsdp 8
#
# The plain command, one process with all GPUs, does the same. This is for input pipelines that one Python process is too
# slow for, and to try on one machine what will run on many. Without GPUs, and with JAX_PLATFORMS=cpu, the processes
# compute on the CPU.
set -euo pipefail

GPUS=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
PORT=${PORT:-12355}
if ! [[ $GPUS =~ ^[1-9][0-9]*$ ]]; then
  echo "error: GPUS=$GPUS (unset: what nvidia-smi lists) must be the number of processes" >&2
  exit 2
fi

processes=()
stop() {
  signalled=1
  kill -TERM "${processes[@]}" 2>/dev/null || true
}
trap stop TERM INT

for ((process = 0; process < GPUS; process++)); do
  CUDA_VISIBLE_DEVICES=$process transformers-jax train "$@" --distributed.coordinator "127.0.0.1:$PORT" \
    --distributed.processes "$GPUS" --distributed.process "$process" &
  processes+=("$!")
done

# A training that lost a process ends by itself, in all processes and within its time limit.
worst=0
for process in "${processes[@]}"; do
  signalled=1
  while [ -n "$signalled" ]; do # a signal ends `wait` before the training has saved
    signalled=""
    code=0
    wait "$process" || code=$?
  done
  [ "$code" -le "$worst" ] || worst=$code
done
exit "$worst"
