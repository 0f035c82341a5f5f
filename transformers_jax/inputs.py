"""What `predict` is asked: texts, JSON lines or pictures, from files, a table or standard input."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers_jax.data.files import decode_lines, kind_of, read_lines
from transformers_jax.data.tables import raise_bad, read_rows
from transformers_jax.loading import Loaded, check_unicode
from transformers_jax.tasks import Task

TABLES = (".csv", ".tsv", ".parquet", ".json")


def read_inputs(loaded: Loaded, name: str, *, skip_bad: bool) -> list[Any]:
    """The inputs in a file, or of standard input for "-", that the task can read.

    ValueError naming the line for one that is empty or broken (or with `skip_bad` their number on standard error), and
    for a file without inputs.
    """
    inputs, skipped = [], 0

    def bad(message: str) -> None:
        nonlocal skipped
        if not skip_bad:
            raise ValueError(f"{message}; --skip-bad leaves such inputs out")
        skipped += 1

    for where, value in _find_inputs(name, loaded.task, bad):
        try:
            check_unicode(value, where)
            loaded.task.check_input(value, loaded.processor, where, full=skip_bad)
        except (ValueError, FileNotFoundError) as error:
            bad(str(error))
        else:
            inputs.append(value)
    if skipped:
        print(f"{skipped} of {skipped + len(inputs)} inputs left out", file=sys.stderr)
    if not inputs:
        raise ValueError(f"{'standard input' if name == '-' else name} holds no input")
    return inputs


def read_text_lines(name: str) -> Iterator[str]:
    """The lines of a file, or of standard input for "-", as they come. ValueError for one that is not UTF-8."""
    path = Path("standard input" if name == "-" else name)
    if name != "-" and not path.is_file():
        raise FileNotFoundError(f"{name} is a directory; name a file" if path.is_dir() else f"no such file: {name}")
    lines = decode_lines(path, sys.stdin.buffer, raise_bad) if name == "-" else read_lines(path, raise_bad)
    for _, line in lines:
        yield line.rstrip("\r\n")


def _find_inputs(name: str, task: Task, bad: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    """Where each input is, and what it is."""
    path, columns = Path(name), task.input_columns
    if name != "-" and (files := task.input_files(name)) is not None:
        yield from zip(files, files, strict=True)
        return
    if name != "-" and (not path.exists() or path.is_dir()):
        raise FileNotFoundError(f"{name} is a directory; name a file" if path.is_dir() else f"no such file: {name}")
    if name != "-" and kind_of(path) in TABLES:
        optional = ("pair",) if columns == ("text",) else ()
        for row in read_rows(name, {column: column for column in columns}, optional=optional, bad=bad):
            cells = zip((*columns, *optional), row.values, strict=True)
            yield row.where, task.located({column: cell for column, cell in cells if cell is not None}, path.parent)
        return
    if name == "-":  # UTF-8, whatever the locale says
        path = Path("standard input")  # whose parent is the current directory
        lines = decode_lines(path, sys.stdin.buffer, bad)
    else:
        lines = read_lines(path, bad)
    for number, line in lines:
        where, line = f"{path}, line {number}", line.rstrip("\r\n")
        if not line.strip():
            bad(f"{where} is empty")
        elif kind_of(path) in (".jsonl", ".ndjson") or line.lstrip().startswith("{"):
            try:
                yield where, task.located(json.loads(line), path.parent)
            except ValueError as error:
                bad(f"{where}: {error}")
        else:
            yield where, task.located(line, path.parent)
