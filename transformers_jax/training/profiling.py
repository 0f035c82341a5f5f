"""A trace of chosen steps by JAX's profiler."""

from pathlib import Path
from typing import Any

import jax


class StepProfiler:
    """Traces the steps from the first to the last of `steps` into `directory`, for a loop that begins after
    `start_step` and asks before and after each step whether it is one of these.

    Process 0 alone writes: XProf shows the files of one folder as one trace, and the profiler names that folder by the
    second in which a process stops and its file by the host, so that those of several processes would not fit together.
    As a context manager it ends a trace that the loop leaves open.
    """

    def __init__(self, steps: tuple[int, int] | None, directory: Path, *, start_step: int = 0):
        self.directory, self.running = directory, False
        self.first, self.last = steps or (0, 0)
        self.refused = ""
        """Why there will be no trace although there should be one."""
        if self.first <= start_step + 1 <= self.last:
            self.refused = (
                f"no trace of steps {self.first} to {self.last}: step {start_step + 1} is the first of this start, and "
                f"compiles. training.profile_steps may begin at {start_step + 2}"
            )
            self.first = 0
        if jax.process_index() > 0:
            self.first, self.refused = 0, ""

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.stop()

    def begins(self, step: int) -> bool:
        return step == self.first

    def ends(self, step: int) -> bool:
        return self.running and step == self.last

    def start(self, state: Any) -> None:
        """Begin, once the devices are done with `state`."""
        jax.block_until_ready(state)
        jax.profiler.start_trace(self.directory)
        self.running = True

    def stop(self) -> str:
        """End and write the trace; the devices must be done with the last step. Says where it is."""
        self.running = False
        jax.profiler.stop_trace()
        return (
            f"steps {self.first} to {self.last} are traced in {self.directory}; "
            f"to see them: pip install xprof && xprof --port 8791 {self.directory}"
        )
