"""Palettes: the few colours that pictures are reduced to, so that each pixel is one token."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

MANY = 1000
"""Of fewer distinct colours k-means is cheap enough to be started several times."""


@dataclasses.dataclass(frozen=True)
class Palette:
    """Colours, each the centre of a cluster of normalised pixels; token i stands for colour i."""

    clusters: tuple[tuple[float, ...], ...]
    """The colours: a number for each channel, as normalised pixels have them."""

    def __post_init__(self):
        widths = {len(colour) for colour in self.clusters}
        if len(self.clusters) < 2 or len(widths) > 1 or not widths <= {1, 3}:
            raise ValueError(
                f"a palette needs at least 2 colours of 1 or 3 channels each, but clusters has {len(self.clusters)} of "
                f"{', '.join(map(str, sorted(widths))) or 'no'} channels"
            )
        if not all(math.isfinite(value) for colour in self.clusters for value in colour):
            raise ValueError("clusters of a palette must be finite numbers")

    @classmethod
    def train(cls, colours: np.ndarray, size: int, *, weights: np.ndarray | None = None) -> "Palette":
        """The centres of `size` clusters of `colours` (count, channels) by k-means, from dark to bright; `weights` says
        how often each colour occurs.

        Computed by scikit-learn in one thread and rounded to 4 decimals (an 8-bit step is about 80 of the last), so
        that the same colours give the same palette again. Raises ValueError for fewer distinct colours than `size`.
        """
        try:
            from sklearn.cluster import KMeans
            from threadpoolctl import threadpool_limits
        except ImportError:
            raise ImportError(
                "a new palette is made by scikit-learn; install it with `pip install 'transformers-jax[metrics]'`"
            ) from None
        distinct = len(np.unique(colours, axis=0))
        if distinct < size:
            raise ValueError(f"a palette of {size} colours needs as many, but the pictures have {distinct}")
        starts: Any = 10 if len(colours) <= MANY else 1  # a number, which scikit-learn declares to be a text
        means = KMeans(size, n_init=starts, random_state=0)
        with threadpool_limits(1):  # threads add up in an order that changes
            centres = means.fit(np.asarray(colours, np.float64), sample_weight=weights).cluster_centers_
        centres = np.round(centres, 4) + 0.0  # no -0
        order = np.lexsort((*centres.T, centres.sum(axis=1)))
        return cls(tuple(tuple(map(float, colour)) for colour in centres[order]))

    def __len__(self) -> int:
        return len(self.clusters)

    @property
    def channels(self) -> int:
        return len(self.clusters[0])

    def ids(self, colours: np.ndarray) -> np.ndarray:
        """The nearest colour of each of `colours` (..., channels), as int32 (...); the first of equally near ones."""
        centres = self._centres
        points = np.asarray(colours, np.float64).reshape(-1, self.channels)
        # |point|^2 is the same for all centres.
        distances = (centres**2).sum(axis=1) - 2 * points @ centres.T
        return distances.argmin(axis=1).astype(np.int32).reshape(colours.shape[:-1])

    def colours(self, ids: np.ndarray) -> np.ndarray:
        """The colours (..., channels) of `ids` (...). ValueError for an id that has none."""
        ids = np.asarray(ids)
        outside = ids[(ids < 0) | (ids >= len(self))]
        if outside.size:
            raise ValueError(f"ids hold {outside.flat[0]} but the palette has the colours 0 to {len(self) - 1}")
        return self._centres[ids]

    @functools.cached_property
    def _centres(self) -> np.ndarray:
        return np.array(self.clusters)
