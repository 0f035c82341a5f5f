"""Contenders measured in turns (A B C A B C ...), each in a worker process, only one of them computing at a time."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Contender:
    """Who is measured: a module with `WORK`, `WARM_UP` and `versions`, and the Python that runs it."""

    module: str
    python: str


@dataclass(frozen=True)
class Row:
    """One piece of work. `bars`: peer -> the ratio (its median time / ours) to reach, None where it is only reported.

    `size` goes to every contender; `work` names the entry of a contender's WORK where it is not the row's name.
    """

    name: str
    about: str
    bars: Mapping[str, float | None]
    size: Mapping[str, Any] = field(default_factory=dict)
    work: Mapping[str, str] = field(default_factory=dict)
    memory: bool = False
    """A training step, whose peak memory is of interest."""
    checkpoint: bool = False
    """Whether the work takes a `checkpoint`: an empty folder, in which ours leaves the model for its peers to read."""


@dataclass
class Result:
    """What one contender needed: seconds an iteration in each round, or why there are none."""

    seconds: list[float] = field(default_factory=list)
    iterations: int = 0
    versions: str = ""
    note: str = ""
    missing: str = ""
    build_seconds: float = 0.0
    build_peak: float = 0.0
    peak: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


class Worker:
    """A running `worker.py`, which has built its work and waits. RuntimeError if it could not."""

    def __init__(self, contender: Contender, work: str, size: Mapping[str, Any], threads: int):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close())
        command = [contender.python, str(FOLDER / "worker.py"), contender.module, work, json.dumps(size), str(threads)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(FOLDER)])}
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
            )
        except OSError as error:
            raise RuntimeError(f"{contender.python}: {error.strerror}") from None
        self.built = self._answer()

    def run(self, iterations: int) -> dict[str, float]:
        """Seconds an iteration, and the peak of memory so far in MB above what the imports took."""
        print(iterations, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        errors = [line for line in lines if "Error" in line and not line.startswith(" ")] or lines
        self.close()
        raise RuntimeError(errors[-1] if errors else f"the process ended with code {self.process.returncode}")


def measure(
    row: Row, contenders: Mapping[str, Contender], *, rounds: int, seconds: float, pause: float, threads: int
) -> dict[str, Result]:
    """Measure `row` for "ours" and every peer that its bars name. A round of each lasts about `seconds`."""
    results: dict[str, Result] = {name: Result() for name in ("ours", *row.bars)}
    workers: dict[str, Worker] = {}
    folder = tempfile.TemporaryDirectory()
    size = dict(row.size) | ({"checkpoint": folder.name} if row.checkpoint else {})
    try:
        for name, result in results.items():
            print(f"  {row.name}: {name} builds and warms up", file=sys.stderr, flush=True)
            try:
                workers[name] = worker = Worker(contenders[name], row.work.get(name, row.name), size, threads)
                once = worker.run(1)["seconds"]
            except RuntimeError as error:
                result.missing = str(error)
                workers.pop(name, None)
                continue
            result.iterations = max(1, round(seconds / once))
            for key in ("versions", "note", "build_seconds", "build_peak"):
                setattr(result, key, worker.built[key])
        for _ in range(rounds):
            for name, worker in list(workers.items()):
                time.sleep(pause)  # threads that spin after their last work fall asleep
                try:
                    answer = worker.run(results[name].iterations)
                except RuntimeError as error:
                    results[name].missing, results[name].seconds = str(error), []
                    del workers[name]
                    continue
                results[name].seconds.append(answer["seconds"])
                results[name].peak = answer["peak"]
    finally:
        for worker in workers.values():
            worker.close()
        folder.cleanup()
    return results


def machine() -> dict[str, Any]:
    """The hardware and how busy it is."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def warn_if_busy(load: float) -> None:
    if load > 0.3:
        print(f"WARNING: the load average is {load:.2f}; with anything else running these numbers mean nothing")


def report(row: Row, results: Mapping[str, Result]) -> dict[str, Any]:
    """Print one row's table; returns it as data."""
    print(f"\n{row.name}: {row.about}")
    ours = results["ours"]
    data: dict[str, Any] = {"about": row.about, "size": dict(row.size), "contenders": {}}
    for name, result in results.items():
        entry: dict[str, Any] = vars(result) | {"bar": row.bars.get(name)}
        if not result.seconds:
            print(f"  {name:14} MISSING: {result.missing}")
        else:
            entry |= {"median": result.median, "spread": result.spread}
            line = f"  {name:14} {result.median * 1e3:10.2f} ms +- {result.spread:5.1%}"
            if name != "ours" and ours.seconds:
                entry["ratio"] = ratio = result.median / ours.median
                line += f"   ratio {ratio:5.2f}"
                if (bar := row.bars[name]) is not None:
                    entry["reached"] = ratio >= bar
                    line += f"   bar {bar:4.2f} {'reached' if ratio >= bar else 'NOT reached'}"
            print(f"{line}   ({', '.join(filter(None, (result.versions, result.note)))})")
        data["contenders"][name] = entry
    return data


def report_memory(row: Row, results: Mapping[str, Result]) -> None:
    print(f"\n{row.name}: peak memory above what the imports took, MB")
    for name, result in results.items():
        if result.seconds:
            print(f"  {name:14} steps {result.peak:8.0f}   building and first steps {result.build_peak:8.0f}")


def alternate(functions: Mapping[str, Any], *, rounds: int) -> dict[str, list[float]]:
    """Call functions of this process in turns; what each call returned (its seconds), by name."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(function())
    return seconds


def chosen(names: Sequence[str], rows: Sequence[Row]) -> list[Row]:
    """The rows of these names, all if there are none; SystemExit for an unknown one."""
    unknown = sorted(set(names) - {row.name for row in rows})
    if unknown:
        raise SystemExit(f"no row {', '.join(unknown)}; there are {', '.join(row.name for row in rows)}")
    return [row for row in rows if not names or row.name in names]
