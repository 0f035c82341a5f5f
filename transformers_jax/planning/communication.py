"""What the devices of each mesh axis send one another in a step, and how long the links take for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers_jax.planning.program import Transfer
from transformers_jax.training.chips import Chip

ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often a ring of n devices sends (n - 1) / n of an array around (Patarasuk and Yuan 2009)."""


@dataclass(frozen=True)
class AxisTraffic:
    """Bytes that each device sends along one mesh axis in a step, by kind; the bandwidth of the axis in bytes a second
    and the seconds that follow, None without a chip."""

    axis: str
    sent: Mapping[str, float]
    bandwidth: float | None = None
    seconds: float | None = None


def traffic(transfers: Sequence[Transfer], mesh: Mapping[str, int], chip: Chip | None) -> tuple[AxisTraffic, ...]:
    """The traffic of each axis with more than one device."""
    result = []
    for axis, size in mesh.items():
        if size == 1:
            continue
        sent = dict.fromkeys(ROUNDS, 0.0)
        for transfer in transfers:
            if transfer.axis == axis:
                sent[transfer.kind] += ROUNDS[transfer.kind] * (size - 1) / size * transfer.bytes * transfer.times
        sent = {kind: count for kind, count in sent.items() if count}
        bandwidth = None if chip is None else _bandwidth(axis, mesh, chip)
        seconds = None if bandwidth is None else sum(sent.values()) / bandwidth
        result.append(AxisTraffic(axis, sent, bandwidth, seconds))
    return tuple(result)


def _bandwidth(axis: str, mesh: Mapping[str, int], chip: Chip) -> float:
    """The last axis of the mesh has neighbours, of one host as far as they fit. Where an axis crosses hosts, its ring
    leaves each one through the adapters of all its devices there."""
    axes = list(mesh)
    apart = 1
    for later in axes[axes.index(axis) + 1 :]:
        apart *= mesh[later]
    if apart * mesh[axis] <= chip.devices_together:
        return chip.link_bandwidth
    inside = max(1, chip.devices_together // apart)
    return min(chip.link_bandwidth, inside * chip.network_bandwidth)
