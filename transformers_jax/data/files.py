"""Files of text: found by name, pattern or directory, plain or gzipped, and read as UTF-8."""

import glob
import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Files that are tables."""


def split_specification(specification: str) -> list[str]:
    """The parts of a comma list. A path that exists may hold commas itself."""
    if os.path.exists(os.path.expanduser(specification)):  # false, not an error, for a list too long to be a path
        return [specification]
    return [part.strip() for part in specification.split(",") if part.strip()]


def find_files(pattern: str, kinds: Sequence[str]) -> list[Path]:
    """Absolute paths of a file, of the sorted matches of a glob, or of the files below a directory that have one of
    the suffixes `kinds` (before `.gz`) and are not hidden."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file()
            and kind_of(file) in kinds
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not found:
            raise FileNotFoundError(f"no text in the directory {pattern}; it is searched for {', '.join(kinds)}")
    elif path.exists():
        found = [path]
    elif glob.has_magic(pattern):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise FileNotFoundError(f"no file matches {pattern}")
    else:
        raise FileNotFoundError(f"no such text file: {pattern}")
    return [file.resolve() for file in found]


def kind_of(path: Path) -> str:
    """The suffix in lower case, `.gz` aside."""
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def file_identity(path: Path) -> list[Any]:
    """Path, size, inode and times of modification and status change, which differ once a file has changed."""
    status = path.stat()
    return [str(path), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def read_bytes(path: Path, read: Callable[[BinaryIO], Iterator[bytes]]) -> Iterator[bytes]:
    """What `read` takes from the opened file, unpacked if it is gzipped."""
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield from read(file)
        return
    try:
        with gzip.open(path) as file:
            yield from read(file)  # pyright: ignore[reportArgumentType]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error})") from None


def not_utf8(path: Path, offset: int, byte: int, line: int | None = None) -> str:
    """The message for a byte that is not UTF-8."""
    place = "" if line is None else f", in line {line},"
    return (
        f"{path}: byte {offset} (0x{byte:02x}){place} is not valid UTF-8; convert the file first, "
        "for example with `iconv -f latin1 -t utf-8`"
    )


def read_lines(path: Path, bad: Callable[[str], None]) -> Iterator[tuple[int, str]]:
    """Numbers (from 1) and texts, with their ends, of the lines of a file, split at newline bytes only, as JSON and CSV
    need. A line that is not UTF-8 is left out once `bad` has accepted the message. A byte order mark is dropped."""
    return decode_lines(path, read_bytes(path, iter), bad)


def decode_lines(path: Path, lines: Iterable[bytes], bad: Callable[[str], None]) -> Iterator[tuple[int, str]]:
    """`read_lines` of lines that come from elsewhere; errors call it `path`."""
    offset = 0
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            bad(not_utf8(path, offset + error.start, line[error.start], number))
        else:
            yield number, text.removeprefix("\ufeff") if number == 1 else text
        offset += len(line)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip()
