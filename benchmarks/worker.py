"""One contender in a process of its own: builds and warms up its work, then runs it whenever it is told to.

Started by `side_by_side.py`, possibly with another Python, so it imports nothing of the package itself. Answers are
JSON lines on the real standard output; whatever libraries print goes to standard error.
"""

import importlib
import json
import os
import sys
import time


def status(name: str) -> float:
    """A field of /proc/self/status in MB (VmRSS: memory now; VmHWM: its peak)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(f"{name}:"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def main(module: str, work: str, size: dict, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values) -> None:
        print(json.dumps(values), file=answers, flush=True)

    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    contender = importlib.import_module(module)
    versions = contender.versions(threads)
    imported = status("VmRSS")
    begin = time.perf_counter()
    run, note = contender.WORK[work](**size)
    run(contender.WARM_UP.get(work, 2))
    answer(
        versions=versions, note=note, build_seconds=time.perf_counter() - begin, build_peak=status("VmHWM") - imported
    )
    reset_peak()
    for line in sys.stdin:
        iterations = int(line)
        begin = time.perf_counter()
        run(iterations)
        answer(seconds=(time.perf_counter() - begin) / iterations, peak=status("VmHWM") - imported)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
