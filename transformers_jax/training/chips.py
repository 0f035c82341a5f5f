"""Accelerators as their makers' data sheets describe them: what a plan and a utilisation are reckoned against.

All rates are dense ones: NVIDIA prints those of its tensor cores "with sparsity", which is twice as much. Bandwidths
are one way, the bytes a second that a device can send: NVIDIA's NVLink and Google's interconnect figures are often
printed for both ways together. For the network, NVIDIA's are those of its own eight-device machines, with one adapter
a device; machines for rent may have less.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GB, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Chip:
    """One device as JAX counts them. `source` is the data sheet."""

    name: str
    memory: float
    """Bytes of its memory."""
    flops: Mapping[str, float]
    """Peak FLOP/s of matrix products by type: bfloat16, float16, tf32 (float32 rounded to 10 bits in tensor cores) and
    float32."""
    memory_bandwidth: float
    """Bytes a second between the device and its memory."""
    link_bandwidth: float
    """Bytes a second that it sends to others of its host (GPUs) or slice (TPUs), over all links together."""
    network_bandwidth: float
    """Bytes a second that it sends to other hosts or slices."""
    devices_together: int
    """Devices that the fast links join: of a host, or of the largest slice."""
    source: str

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products whose arguments are of this type, at JAX's default precision: float32 goes through
        TF32 on NVIDIA's tensor cores and through bfloat16 on a TPU."""
        if dtype == "float32":
            dtype = next(name for name in ("tf32", "bfloat16", "float32") if name in self.flops)
        if dtype not in self.flops:
            raise ValueError(f"no peak for {dtype} is known of {self.name}; there are {', '.join(self.flops)}")
        return self.flops[dtype]


def _gpu(
    name: str, memory: float, half: float, tf32: float, float32: float, bandwidth: float, link: float, network: float,
    source: str,
) -> Chip:  # fmt: skip
    """Memory in GB, rates in TFLOP/s, bandwidths in GB/s."""
    flops = dict(bfloat16=half * TERA, float16=half * TERA, tf32=tf32 * TERA, float32=float32 * TERA)
    return Chip(name, memory * GB, flops, bandwidth * GB, link * GB, network * GB, 8, f"NVIDIA, {source}")


def _tpu(name: str, memory: float, half: float, bandwidth: float, link: float, network: float, slice_: int) -> Chip:
    """Memory in GB, the rate in TFLOP/s, bandwidths in GB/s."""
    source = f"Google Cloud, TPU {name}, table of specifications"
    return Chip(name, memory * GB, dict(bfloat16=half * TERA), bandwidth * GB, link * GB, network * GB, slice_, source)


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu("a100-40", 40, 312, 156, 19.5, 1555, 300, 25, "A100 Tensor Core GPU data sheet (SXM); DGX A100"),
        _gpu("a100", 80, 312, 156, 19.5, 2039, 300, 25, "A100 Tensor Core GPU data sheet (80 GB SXM); DGX A100"),
        _gpu("h100", 80, 989.4, 494.7, 66.9, 3350, 450, 50, "H100 Tensor Core GPU data sheet (SXM5); DGX H100"),
        _gpu("h100-pcie", 80, 756, 378, 51, 2000, 64, 50, "H100 Tensor Core GPU data sheet (PCIe, without a bridge)"),
        _gpu("h200", 141, 989.4, 494.7, 66.9, 4800, 450, 50, "H200 Tensor Core GPU data sheet (SXM); DGX H200"),
        _gpu("b200", 180, 2250, 1125, 75, 8000, 900, 50, "DGX B200 and HGX B200 data sheets, an eighth of the machine"),
        # Google gives no network rate of v4: assumed are 200 Gbit/s for a host of four chips.
        _tpu("v4", 32, 275, 1200, 300, 6.25, 4096),
        _tpu("v5e", 16, 197, 819, 200, 3.125, 256),
        _tpu("v5p", 95 * 2**30 / GB, 459, 2765, 600, 6.25, 6144),
        _tpu("v6e", 32, 918, 1640, 400, 12.5, 256),
    )
}
"""By name. A v5e has 400 GB/s of links for both ways together, and so on."""

_KINDS = (
    (r"A100.*40\s?GB", "a100-40"),
    (r"A100", "a100"),
    (r"H100 PCIe", "h100-pcie"),
    (r"H100 80GB HBM3", "h100"),
    (r"H200(?! NVL)", "h200"),
    (r"\bB200", "b200"),
    (r"TPU v4$", "v4"),
    (r"TPU v5 lite|TPU v5e", "v5e"),
    (r"TPU v5p?$", "v5p"),
    (r"TPU v6 lite|TPU v6e", "v6e"),
)
"""What `device_kind` says -> name. Kinds of which only a part is known by name, such as the H100 NVL, are left out."""


def chip_of(device: Any) -> Chip | None:
    """The chip that a JAX device is, by its `device_kind`; None for a CPU and for what is not listed."""
    kind = device.device_kind
    return next((CHIPS[name] for pattern, name in _KINDS if re.search(pattern, kind)), None)


def find_chip(name: str) -> Chip:
    """The chip of this name, in whatever case; a ValueError lists those there are."""
    if name.lower() not in CHIPS:
        raise ValueError(f"unknown chip {name!r}; there are {', '.join(CHIPS)}")
    return CHIPS[name.lower()]
