#!/usr/bin/env bash
# `transformers-jax train "$@"` for launchers that go by exit codes.
#
# After SIGTERM a training of one process saves and exits 0, which SLURM and Kubernetes would take for a training that is
# done; one of many processes exits 75 (EX_TEMPFAIL), whichever of them had the signal. This passes the signal on and then
# exits 75 in both cases, so that the launcher starts the same command again; that goes on from what was saved. 75 also if
# the signal came before the training could handle it. Any other code is the training's.
set -u

stopped=
child=
stop() {
  stopped=1 signalled=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM

transformers-jax train "$@" &
child=$!
[ -z "$stopped" ] || kill -TERM "$child" 2>/dev/null # it came while the training was being started
signalled=1
while [ -n "$signalled" ]; do # a signal ends `wait` before the training has saved
  signalled=
  wait "$child"
  code=$?
done
if [ -n "$stopped" ] && { [ "$code" -eq 0 ] || [ "$code" -eq 143 ]; }; then
  code=75
fi
exit "$code"
