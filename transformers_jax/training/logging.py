"""What a person sees of a run, and what stays of it: a progress bar or plain lines, `metrics.jsonl`, TensorBoard."""

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

_REFRESH_SECONDS = 0.1


class MetricsLogger:
    """Writes the numbers of a run below `workdir`, and shows them.

    `metrics.jsonl` holds one JSON object a line: `step`, then the metrics by name (`loss`, `learning_rate`,
    `eval/loss`, ...). JSON has no NaN or infinity: such a number is written as null, and its name and value as text go
    into the line's `non_finite` object. TensorBoard event files are written where `tensorboardX` is installed.

    `console` is "bar" (a live bar), "lines" (a plain line for each `log`), "none", or "auto": the bar on a terminal,
    lines elsewhere. Only process 0 writes and shows anything, and only if `enabled`.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        total_steps: int,
        enabled: bool = True,
        console: Literal["auto", "bar", "lines", "none"] = "auto",
    ) -> None:
        self.path = Path(workdir) / "metrics.jsonl"
        self._enabled = enabled and jax.process_index() == 0
        self._total = total_steps
        self._console = Console()
        if console == "auto":
            live = sys.stdout.isatty() and self._console.is_terminal and not self._console.is_dumb_terminal
            console = "bar" if live else "lines"
        self._mode = console
        self._file: Any = None
        self._tensorboard: Any = None
        self._purge_step: int | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._shown: dict[str, str] = {}
        self._step = 0
        self._clock: tuple[int, float] | None = None  # step and time from which the speed is measured
        self._next_refresh = 0.0

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def truncate(self, step: int) -> None:
        """Forget everything after `step`, where a run continues. Call it before the first `log`.

        The file is replaced as a whole, so that a kill leaves either the old or the new one. A last line that was
        being written when the run was killed is dropped.
        """
        if not self._enabled:
            return
        self._close_files()
        self._purge_step = step + 1
        self._rewrite(step)

    def update(self, step: int) -> None:
        """Tell the bar that `step` updates are done. Cheap: to be called at every step."""
        self._step = step
        now = time.monotonic()
        if self._clock is None or step < self._clock[0]:
            self._clock = step, now  # after the first step, which compiles
        if now >= self._next_refresh and self._enabled and self._mode == "bar":
            self._next_refresh = now + _REFRESH_SECONDS
            self._refresh()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of `step` (scalars: Python, NumPy or JAX numbers, or text) and show the important ones."""
        self.update(step)
        if not self._enabled:
            return
        values = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        self._write(step, values)
        self._shown |= (shown := dict(_shown(values)))
        evaluated = any(name.startswith("eval/") for name in values)
        if self._mode == "lines" or (self._mode == "bar" and evaluated):
            left = [f"{self._time_left()} left"] if self._time_left() and not evaluated else []
            self.print("  ".join([f"step {step:,}/{self._total:,}", *shown.values(), *left]))
        if self._mode == "bar":
            self._refresh()

    def print(self, *objects: object) -> None:
        """Like `print`, above the bar if there is one."""
        if not self._enabled or self._mode == "none":
            return
        if self._progress is None:
            print(*objects, flush=True)
        else:
            # Written as it is: no markup, no colours, no wrapping.
            self._progress.console.print(*objects, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def print_summary(self, facts: Mapping[str, object], *, title: str = "") -> None:
        """One table of facts about the run; integers from a thousand on are shortened (124,439,808 -> 124.4 M)."""
        if not self._enabled or self._mode == "none":
            return
        rows = {name: _fact(value) for name, value in facts.items()}
        if self._mode == "lines":
            width = max(map(len, rows), default=0)
            self.print("\n".join([*([title] if title else []), *(f"{name:<{width}}  {rows[name]}" for name in rows)]))
            return
        table = Table(show_header=False, title=title or None, title_justify="left")
        for name, value in rows.items():
            table.add_row(name, value)
        (self._console if self._progress is None else self._progress.console).print(table, markup=False)

    def close(self) -> None:
        """Leave the bar as it stands and close the files. Logging again opens them again."""
        if self._progress is not None:
            self._refresh()
            self._progress.stop()
            self._progress = None
        self._close_files()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        non_finite = {name: str(v) for name, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        record = {"step": step} | values | dict.fromkeys(non_finite)
        if non_finite:
            record["non_finite"] = non_finite
        line = json.dumps(record, allow_nan=False)
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if _is_torn(self.path):
                self._rewrite(None)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(line + "\n")
        self._file.flush()
        if self._tensorboard is None:
            self._tensorboard = _summary_writer(self.path.parent / "tensorboard", self._purge_step)
        for name, value in values.items():
            if self._tensorboard and isinstance(value, int | float) and name not in non_finite:
                self._tensorboard.add_scalar(name, value, step)

    def _rewrite(self, last_step: int | None) -> None:
        """Keep the whole lines of the file, up to `last_step` if given."""
        if not self.path.exists():
            return
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        with self.path.open("rb") as old, temporary.open("wb") as new:
            for line in old:
                record = _parse(line)
                if record is not None and (last_step is None or record.get("step", 0) <= last_step):
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        os.replace(temporary, self.path)

    def _close_files(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        self._file = self._tensorboard = None

    def _time_left(self) -> str:
        if self._clock is None or self._step <= self._clock[0]:
            return ""
        seconds_per_step = (time.monotonic() - self._clock[1]) / (self._step - self._clock[0])
        return format_duration(seconds_per_step * max(self._total - self._step, 0))

    def _refresh(self) -> None:
        if self._progress is None:
            whole = Column(no_wrap=True)
            self._progress = Progress(
                TextColumn("step {task.completed:,.0f}/{task.total:,.0f}", table_column=whole),
                BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
                TextColumn("{task.fields[numbers]}", markup=False, table_column=whole),
                console=self._console,
                refresh_per_second=1 / _REFRESH_SECONDS,
                expand=True,
            )
            self._task = self._progress.add_task("", total=self._total, completed=self._step, numbers="")
            self._progress.start()
        numbers = [self._shown[name] for name in ("loss", "learning_rate", "rate", "mfu") if name in self._shown]
        if left := self._time_left():
            numbers.append(f"{left} left")
        self._progress.update(self._task, completed=self._step, numbers="  ".join(numbers))


def format_count(value: float) -> str:
    """124439808 -> "124.4 M", 1234 -> "1.2 k", 12 -> "12"."""
    units = ("", " k", " M", " B", " T", " P", " E")
    power = 0
    while abs(round(value, 1)) >= 1000 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.1f}{units[power]}" if power else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """185 -> "3:05", 3725 -> "1:02:05", 100000 -> "1 d 3:46:40"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _shown(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The metrics a person follows, as text."""
    for name, value in values.items():
        if not isinstance(value, int | float):
            continue
        if name.endswith("_per_second"):
            yield "rate", f"{format_count(value)} {name.removesuffix('_per_second')}/s"
        elif name == "learning_rate":
            yield name, f"lr {value:.2e}"
        elif name == "mfu":
            yield name, f"MFU {value:.1%}"
        elif name == "data_wait":
            yield name, f"waiting for data {value:.1%}"
        elif name == "loss" or name.startswith("eval/"):
            yield name, f"{name} {value:.4f}" if abs(value) < 1000 else f"{name} {value:.3e}"


def _fact(value: object) -> str:
    return format_count(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and line.endswith(b"\n") else None


def _is_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _summary_writer(directory: Path, purge_step: int | None) -> Any:
    """A TensorBoard writer that hides events from `purge_step` on, or False where `tensorboardX` is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        return False
    from tensorboardX import SummaryWriter

    # Two writers of one second would otherwise write the same file.
    suffix = f".{time.time_ns()}"
    return SummaryWriter(str(directory), purge_step=purge_step, flush_secs=30, filename_suffix=suffix)
