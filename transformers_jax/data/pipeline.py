"""From token ids to batches: fixed by seed and step alone, whatever the number of processes, threads and restarts.

Datasets are `grain.MapDataset`s of examples: `dataset[i]` is example i as a dictionary of arrays, of the same shapes
for every i. Examples of different lengths come as `Ragged`. `training_batches` and `evaluation_batches` take both.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import grain
import numpy as np

from transformers_jax.data.token_budget import NOBODY, TokenBudget
from transformers_jax.data.workers import WorkerProcesses

IGNORED_LABEL = -100
"""Labels with this value do not count in a loss."""

SHUFFLE_ROUNDS = 10
EPOCHS = 1 << 40  # without end, as far as anyone trains


def token_blocks(
    tokens: np.ndarray, length: int, *, sampling: Literal["blocks", "windows"] = "blocks"
) -> grain.MapDataset:
    """Examples `{"input_ids": (length,) int32, "labels": (length,) int32}` for next-token prediction, from one long
    sequence of ids; `labels[i]` is the token after `input_ids[i]`.

    - `blocks`: `(len(tokens) - 1) // length` blocks one after the other, through document borders. Each token is a
      label once an epoch, except the first and at most `length - 1` at the end, which are left out.
    - `windows`: one example for every start from 0 to `len(tokens) - length - 1`, as nanoGPT draws them (here without
      replacement). An epoch reads every token about `length` times.

    Ids are read when an example is, so `tokens` may be a memory map larger than memory. Raises `ValueError` with fewer
    than `length + 1` tokens.
    """
    if length < 1:
        raise ValueError(f"the block length is {length}; it must be at least 1")
    if sampling not in ("blocks", "windows"):
        raise ValueError(f"unknown sampling {sampling!r}; use blocks or windows")
    if len(tokens) < length + 1:
        raise ValueError(
            f"the text has {len(tokens)} tokens, but blocks of {length} need at least {length + 1}; use more text or "
            "shorter blocks"
        )
    if sampling == "blocks":
        return grain.MapDataset.source(_Blocks(tokens, length, stride=length, count=(len(tokens) - 1) // length))
    return grain.MapDataset.source(_Blocks(tokens, length, stride=1, count=len(tokens) - length))


def evaluation_blocks(tokens: np.ndarray, length: int) -> grain.MapDataset:
    """Examples as in `token_blocks` in which every token but the first is a label exactly once.

    The last block is filled up with id 0 and label -100. Raises `ValueError` with fewer than two tokens.
    """
    if length < 1:
        raise ValueError(f"the block length is {length}; it must be at least 1")
    if len(tokens) < 2:
        raise ValueError(f"the held-out text has {len(tokens)} tokens, but at least 2 are needed; hold out more text")
    return grain.MapDataset.source(_Blocks(tokens, length, stride=length, count=-(-(len(tokens) - 1) // length)))


@dataclass(frozen=True, eq=False)
class Ragged:
    """Examples of different lengths: `dataset[i]` has `lengths[i]` tokens, at most `max_length`.

    A batch is filled up on the right to the smallest of `length_buckets` that holds its longest row, so that a run
    compiles a handful of shapes. `padding` names the arrays that have one value a token, and what fills them up; the
    batch gets an `attention_mask`. All other arrays have the same shape in every example.
    """

    dataset: grain.MapDataset
    lengths: np.ndarray
    max_length: int
    padding: Mapping[str, int]

    def __post_init__(self):
        if len(self.lengths) != len(self.dataset):
            raise ValueError(f"there are {len(self.lengths)} lengths for {len(self.dataset)} examples")
        if len(self.lengths) and not 1 <= min(self.lengths) <= max(self.lengths) <= self.max_length:
            raise ValueError(
                f"lengths must be 1 to {self.max_length}, not {min(self.lengths)} to {max(self.lengths)}"
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self.dataset)

    def collate(self, rows: Sequence[Mapping[str, np.ndarray]], length: int) -> dict[str, np.ndarray]:
        """A batch of `rows` with `length` tokens a row."""
        batch = {}
        for name in rows[0]:
            if name in self.padding:
                batch[name] = np.full((len(rows), length), self.padding[name], np.int32)
                for i, row in enumerate(rows):
                    batch[name][i, : len(row[name])] = row[name]
            else:
                batch[name] = np.stack([row[name] for row in rows])
        tokens = np.array([len(row["input_ids"]) for row in rows])
        return batch | {"attention_mask": (np.arange(length) < tokens[:, None]).astype(np.int32)}

    def bucket(self, indices: Sequence[int] | np.ndarray) -> int:
        """The length of a batch of these examples."""
        longest = max(self.lengths[index % len(self)] for index in indices)
        return next(length for length in length_buckets(self.max_length) if length >= longest)


@functools.cache
def length_buckets(max_length: int) -> tuple[int, ...]:
    """The lengths that batches are filled up to: 16, 24, 32, 48, 64, 96, 128, 192, ... and `max_length`."""
    powers = [16 << i for i in range(max_length.bit_length())]
    steps = sorted({*powers, *(3 * power // 2 for power in powers)})
    return (*(length for length in steps if length < max_length), max_length)


def training_batches(
    dataset: grain.MapDataset | Ragged,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    num_threads: int = 1,
    prefetch: int = 8,
    processes: int = 0,
    group_by_length: int = 16,
    batch_tokens: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Batches without end, from step `start_step` on: this process's rows of each.

    The global batch of step n is rows `n * batch_size` to `(n + 1) * batch_size` of the dataset, shuffled anew each
    epoch (every example once an epoch; a batch may hold the end of one and the beginning of the next). It depends on
    `seed` and n only. Process i has its i-th part, `batch_size / process_count` rows. To continue a run, pass the
    number of steps done.

    Of a `Ragged` dataset, the rows of every `group_by_length` batches are sorted by length, cut into batches anew, and
    these shuffled: rows of similar length meet, and little is filled up. 1 leaves the batches as they were drawn.
    With `batch_tokens`, its batches have as many rows as that many tokens hold instead, as `TokenBudget` describes.

    `num_threads` threads prepare up to `prefetch` batches ahead; 0 threads prepare each when it is asked for. With
    `processes`, that many worker processes prepare them instead, which pays where Python is the bottleneck, as in
    changing pictures; each has its own copy of the dataset. The batches are the same in every case.
    Raises `ValueError` for a batch that the processes cannot share evenly, an empty dataset or a negative seed or step.
    """
    local = _local_batch_size(dataset, batch_size, process_index, process_count)
    if group_by_length < 1:
        raise ValueError(f"group_by_length={group_by_length} must be at least 1")
    if seed < 0 or start_step < 0:
        raise ValueError(f"seed {seed} and start_step {start_step} must not be negative")
    if batch_tokens is not None:
        budget = token_budget(dataset, batch_size=batch_size, batch_tokens=batch_tokens, seed=seed)
        share = process_index, process_count
        batches = grain.MapDataset.source(_Budgeted(dataset, budget, share))[start_step:]  # pyright: ignore
    elif isinstance(dataset, Ragged):
        mine = slice(process_index * local, (process_index + 1) * local)
        batches = grain.MapDataset.source(_Grouped(dataset, seed, batch_size, mine, group_by_length))[start_step:]
    else:
        rows = grain.MapDataset.source(_Shuffled(dataset, seed))
        batches = rows.batch(local)[start_step * process_count + process_index :: process_count]
    return _ahead(batches, num_threads, prefetch, processes)


def token_budget(
    dataset: grain.MapDataset | Ragged, *, batch_size: int, batch_tokens: int, seed: int = 0
) -> TokenBudget:
    """How a `Ragged` dataset is cut into batches of so many tokens; ValueError for any other."""
    if not isinstance(dataset, Ragged):
        raise ValueError("batch_tokens cuts examples of unlike length into batches; all of these have the same length")
    buckets = length_buckets(dataset.max_length)
    return TokenBudget(dataset.lengths, buckets, batch_size=batch_size, batch_tokens=batch_tokens, seed=seed)


def evaluation_batches(
    dataset: grain.MapDataset | Ragged,
    *,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    num_threads: int = 0,
    prefetch: int = 8,
    processes: int = 0,
) -> Iterator[dict[str, Any]]:
    """All examples, once: this process's rows of each global batch, with their numbers as `example`.

    They come in order, those of a `Ragged` dataset from the shortest to the longest. Every batch has the full size and
    every process the same number of batches: the missing rows of the last one repeat another example with `example`
    -1 and labels that do not count (-100, or NaN for numbers). `num_threads`, `prefetch` and `processes` are those of
    `training_batches`, which also says what raises.
    """
    local = _local_batch_size(dataset, batch_size, process_index, process_count)
    mine = slice(process_index * local, (process_index + 1) * local)
    return _ahead(grain.MapDataset.source(_InOrder(dataset, batch_size, mine)), num_threads, prefetch, processes)


def _ahead(batches: grain.MapDataset, num_threads: int, prefetch: int, processes: int) -> Iterator[dict[str, Any]]:
    """The batches one after the other, prepared by threads or processes."""
    if processes < 0:
        raise ValueError(f"the number of worker processes is {processes}; it must be at least 0")
    workers = WorkerProcesses(batches, processes) if processes else None
    if workers is not None:
        batches = grain.MapDataset.source(workers)
        num_threads = processes + 1  # a thread waits for each process, and one has the next request ready
        prefetch = max(prefetch, num_threads)
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch if num_threads else 0)
    return _closed_at_the_end(iter(batches.to_iter_dataset(options)), workers)


def _closed_at_the_end(batches: Any, workers: WorkerProcesses | None) -> Iterator[dict[str, Any]]:
    """`batches`; whoever drops them does not wait for those that are being prepared."""
    try:
        yield from batches
    finally:
        batches.close()
        if workers is not None:
            workers.close()


def _row(dataset: grain.MapDataset | Ragged, index: SupportsIndex) -> dict[str, Any]:
    row: Any = (dataset.dataset if isinstance(dataset, Ragged) else dataset)[int(index)]
    return row


def _uncounted(row: dict[str, Any]) -> dict[str, Any]:
    if "labels" not in row:
        return row
    labels = np.asarray(row["labels"])
    ignored = np.nan if np.issubdtype(labels.dtype, np.floating) else IGNORED_LABEL
    return row | {"labels": np.full_like(labels, ignored)}


def _local_batch_size(
    dataset: grain.MapDataset | Ragged, batch_size: int, process_index: int, process_count: int
) -> int:
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index {process_index} must be at least 0 and below process_count {process_count}")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(f"batch_size {batch_size} must be a positive multiple of the {process_count} processes")
    if len(dataset) == 0:
        raise ValueError("the dataset is empty; nothing can be trained or evaluated on it")
    return batch_size // process_count


class _InOrder:
    """The batches of one pass over a dataset."""

    def __init__(self, dataset: grain.MapDataset | Ragged, batch_size: int, mine: slice):
        self.dataset, self.batch_size, self.mine = dataset, batch_size, mine
        ragged = isinstance(dataset, Ragged)
        self.order = np.argsort(dataset.lengths, kind="stable") if ragged else np.arange(len(dataset))

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        dataset, start = self.dataset, int(index) * self.batch_size
        examples = self.order[start : start + self.batch_size]
        numbers = np.full(self.batch_size, -1, np.int32)
        numbers[: len(examples)] = examples
        mine = numbers[self.mine]
        rows = [_row(dataset, number) for number in mine if number >= 0]
        if missing := len(mine) - len(rows):  # made once: a picture takes its time
            rows += [_uncounted(_row(dataset, examples[0]))] * missing
        if isinstance(dataset, Ragged):
            batch = dataset.collate(rows, dataset.bucket(examples))
        else:
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return batch | {"example": mine}


class _Blocks:
    """Random access to blocks of ids; the last may reach over the end of them."""

    def __init__(self, tokens: np.ndarray, length: int, *, stride: int, count: int):
        self.tokens = np.asarray(tokens)  # slices of a plain array cost less than those of a memory map
        self.length, self.stride, self.count = length, stride, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self.stride
        ids = self.tokens[start : start + self.length + 1].astype(np.int32)
        input_ids, labels = ids[:-1], ids[1:]
        if (missing := self.length - len(labels)) > 0:
            input_ids = np.pad(input_ids, (0, missing))
            labels = np.pad(labels, (0, missing), constant_values=IGNORED_LABEL)
        return {"input_ids": input_ids, "labels": labels}


class _Shuffled:
    """Epoch after epoch of a dataset, each in its own random order, with random access.

    Used instead of `MapDataset.shuffle`, whose 4 rounds of mixing are too few for large datasets: the variance of the
    mean position of a batch (of 12) was 1.6 times that of independent draws over the windows of a million tokens, and
    5 times over 4e9 examples; with 10 rounds it is 1.0 times.
    """

    def __init__(self, dataset: grain.MapDataset, seed: int):
        self.dataset, self.size, self.seed = dataset, len(dataset), seed

    def __len__(self) -> int:
        return min(self.size * EPOCHS, 1 << 62)

    def shuffled(self, position: int) -> int:
        """The index in the endless dataset: the epoch stays in it, since grain keys random transformations by it."""
        epoch, position = divmod(int(position), self.size)
        seed = _derived_seed(self.seed, epoch)
        shuffled = grain.experimental.index_shuffle(position, self.size - 1, seed=seed, rounds=SHUFFLE_ROUNDS)
        return epoch * self.size + shuffled

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.shuffled(index)]


class _Grouped:
    """The batches of a shuffled `Ragged` dataset, in groups within which rows are ordered by length."""

    def __init__(self, ragged: Ragged, seed: int, batch_size: int, mine: slice, batches: int):
        self.ragged, self.seed, self.batch_size, self.mine, self.batches = ragged, seed, batch_size, mine, batches
        self.endless = _Shuffled(ragged.dataset, seed)
        self.group = functools.lru_cache(maxsize=4)(self._group)

    def __reduce__(self) -> tuple[Any, ...]:  # the cache stays behind
        return _Grouped, (self.ragged, self.seed, self.batch_size, self.mine, self.batches)

    def __len__(self) -> int:
        return len(self.endless) // self.batch_size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        group, place = divmod(int(index), self.batches)
        indices = self.group(group)[place]
        rows: list[Any] = [self.ragged.dataset[int(index)] for index in indices[self.mine]]
        return self.ragged.collate(rows, self.ragged.bucket(indices))

    def _group(self, group: int) -> np.ndarray:
        """(batches, batch_size) indices."""
        size = self.batches * self.batch_size
        indices = np.array([self.endless.shuffled(group * size + i) for i in range(size)])
        by_length = indices[np.argsort(self.ragged.lengths[indices % len(self.ragged)], kind="stable")]
        order = np.random.default_rng([self.seed, group]).permutation(self.batches)
        return by_length.reshape(self.batches, self.batch_size)[order]


class _Budgeted:
    """The batches of a `Ragged` dataset that hold about equally many tokens: this process's rows of each."""

    def __init__(self, ragged: Ragged, budget: TokenBudget, share: tuple[int, int]):
        self.ragged, self.budget, self.share = ragged, budget, share

    def __len__(self) -> int:
        return self.budget.batches * EPOCHS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        epoch, length, examples = self.budget[int(index)]
        part, parts = self.share
        local = len(examples) // parts
        mine = examples[part * local : (part + 1) * local]
        # The epoch stays in the index, since grain keys random transformations by it.
        first = epoch * len(self.ragged)
        rows = [_row(self.ragged, first + example) for example in mine if example != NOBODY]
        if missing := len(mine) - len(rows):
            rows += [_uncounted(_row(self.ragged, first + examples[0]))] * missing
        return self.ragged.collate(rows, length)


@functools.lru_cache(maxsize=64)
def _derived_seed(seed: int, number: int) -> int:
    # Not seed + number, which would make one run's second epoch another run's first.
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
