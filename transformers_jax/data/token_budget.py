"""Batches of about equally many tokens: many short examples, or few long ones."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

NOBODY = -1
"""Stands for an example where the last batch of an epoch is filled up."""


class TokenBudget:
    """How the examples of every epoch are cut into batches of at most `batch_tokens` tokens, padding included.

    All rows of a batch are filled up to one of the lengths `buckets`, whose batches all have the same number of rows:
    the largest multiple of `batch_size` that the tokens allow, and `batch_size` at least. What is left over of a length
    goes into batches of the next one, so only the last batch of an epoch is not full, and all epochs have the same
    number of `batches`. Every example occurs once an epoch, in an order that follows from seed and epoch alone.
    """

    def __init__(
        self, lengths: np.ndarray, buckets: Sequence[int], *, batch_size: int, batch_tokens: int, seed: int = 0
    ):
        places = np.searchsorted(buckets, lengths)
        used = [place for place in range(len(buckets)) if (places == place).any()]
        self.lengths = [buckets[place] for place in used]
        if self.lengths and batch_tokens < batch_size * self.lengths[-1]:
            raise ValueError(
                f"batch_tokens={batch_tokens} do not hold batch_size={batch_size} examples of {self.lengths[-1]} "
                "tokens; raise it, or lower batch_size"
            )
        self.rows = [batch_tokens // length // batch_size * batch_size for length in self.lengths]
        self.seed = seed
        self._members = [np.flatnonzero(places == place) for place in used]
        self.batches, left = 0, 0
        for rows, members in zip(self.rows, self._members, strict=True):
            full, left = divmod(left + len(members), rows)
            self.batches += full
        self.batches += left > 0
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def __getstate__(self) -> dict[str, Any]:  # the cache stays behind
        return {name: value for name, value in vars(self).items() if name != "epoch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)

    def __getitem__(self, number: int) -> tuple[int, int, np.ndarray]:
        """Epoch, length and examples of batch `number` of all epochs."""
        epoch, place = divmod(number, self.batches)
        length, examples = self.epoch(epoch)[place]
        return epoch, length, examples

    def _epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        random = np.random.default_rng([self.seed, epoch])
        batches, left = [], np.zeros(0, np.int64)
        for length, rows, members in zip(self.lengths, self.rows, self._members, strict=True):
            pool = random.permutation(np.concatenate([left, members]))
            cut = len(pool) // rows * rows
            batches += [(length, examples) for examples in pool[:cut].reshape(-1, rows)]
            left = pool[cut:]
        if len(left):
            filled = np.concatenate([left, np.full(self.rows[-1] - len(left), NOBODY)])
            batches.append((self.lengths[-1], filled))
        return [batches[place] for place in random.permutation(len(batches))]
