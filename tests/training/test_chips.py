"""Chips: the kinds that JAX reports are found, and the numbers fit those that their makers give of whole machines."""

from types import SimpleNamespace

import jax
import pytest

from transformers_jax.training.chips import CHIPS, chip_of, find_chip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
    ],
)
def test_the_kinds_that_jax_reports_are_found(kind, name):
    chip = chip_of(SimpleNamespace(device_kind=kind))
    assert chip is CHIPS[name] and chip.name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 NVL", "NVIDIA GB200", "TPU v4 lite"])
def test_what_is_not_listed_is_no_chip(kind):
    assert chip_of(SimpleNamespace(device_kind=kind)) is None


def test_a_cpu_is_no_chip():
    assert chip_of(jax.devices("cpu")[0]) is None


def test_the_numbers_add_up_to_those_of_whole_machines():
    assert 8 * CHIPS["a100"].flops["bfloat16"] == pytest.approx(5e15 / 2, rel=0.01)  # DGX A100: 5 petaFLOPS, sparse
    assert 8 * CHIPS["h100"].flops["bfloat16"] == pytest.approx(32e15 / 4, rel=0.02)  # DGX H100: 32, FP8 and sparse
    assert 8 * CHIPS["b200"].flops["bfloat16"] == pytest.approx(72e15 / 4, rel=0.01)  # DGX B200: 72, FP8 and sparse
    assert 8 * CHIPS["h100"].memory == 640e9 and 8 * CHIPS["h200"].memory == 1128e9
    assert 8 * CHIPS["h100"].link_bandwidth == 7.2e12 / 2  # DGX H100: 7.2 TB/s between GPUs, both ways
    assert 256 * CHIPS["v5e"].flops["bfloat16"] == pytest.approx(50.63e15, rel=0.01)  # a pod of 256
    assert 256 * CHIPS["v6e"].flops["bfloat16"] == pytest.approx(234.9e15, rel=0.01)
    assert 256 * CHIPS["v6e"].network_bandwidth == 25.6e12 / 8  # 25.6 Tbit/s a pod
    for chip in CHIPS.values():
        assert chip.network_bandwidth < chip.link_bandwidth < chip.memory_bandwidth
        assert chip.flops.get("float32", 0) < chip.flops.get("tf32", 1) < chip.flops["bfloat16"]


def test_float32_products_run_as_jax_runs_them():
    assert CHIPS["h100"].peak("float32") == CHIPS["h100"].flops["tf32"]
    assert CHIPS["v4"].peak("float32") == CHIPS["v4"].flops["bfloat16"]
    with pytest.raises(ValueError, match="no peak for float16 is known of v4; there are bfloat16"):
        CHIPS["v4"].peak("float16")


def test_an_unknown_chip_lists_those_there_are():
    assert find_chip("H100") is CHIPS["h100"]
    with pytest.raises(ValueError, match="unknown chip 'h1000'; there are a100-40, a100, h100"):
        find_chip("h1000")
