"""Which way of computing attention is taken, and why not another."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformers_jax.nn import Causal, Full, Global, Local, choose_implementation, kernels
from transformers_jax.training.mesh import MeshConfig, make_mesh, on_mesh

WINDOW = Causal() & Local(256)


def chosen(monkeypatch, backend, *, q=4096, k=None, heads=8, head_dim=64, dtype=jnp.bfloat16, batch=1, **options):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    query, key = (jax.ShapeDtypeStruct((batch, n, heads, head_dim), dtype) for n in (q, q if k is None else k))
    return choose_implementation(query, key, key, **options)


@pytest.mark.parametrize(
    ("backend", "options", "way"),
    [
        ("cpu", dict(q=512), "plain"),
        ("cpu", dict(q=512, pattern=Local(2)), "plain"),  # too short to be worth it
        ("cpu", dict(pattern=WINDOW), "blockwise"),
        ("cpu", dict(q=1024, pattern=Causal() & Local(900)), "plain"),  # nearly all of it
        ("cpu", dict(q=2048, heads=2), "plain"),
        ("cpu", dict(), "blockwise"),  # 2^27 scores
        ("cpu", dict(q=1, k=4096, query_offset=4095, pattern=WINDOW), "plain"),
        ("cpu", dict(pattern=Local(64) | Global(2)), "blockwise"),
        ("gpu", dict(), "cudnn"),
        ("gpu", dict(pattern=Causal()), "cudnn"),
        ("gpu", dict(pattern=WINDOW), "blockwise"),
        ("gpu", dict(dtype=jnp.float32), "blockwise"),
        ("gpu", dict(q=512, dropped=True), "plain"),
        ("gpu", dict(q=511), "plain"),
        ("gpu", dict(q=512, head_dim=20), "plain"),
        ("tpu", dict(), "splash"),
        ("tpu", dict(pattern=WINDOW), "splash"),
        ("tpu", dict(q=512, mask=jax.ShapeDtypeStruct((1, 1, 1, 512), bool)), "splash"),
        ("tpu", dict(q=512, mask=jax.ShapeDtypeStruct((1, 1, 512, 512), bool)), "plain"),
        ("tpu", dict(q=500), "plain"),
        ("tpu", dict(pattern=WINDOW, dropped=True), "blockwise"),
    ],
    ids=str,
)
def test_the_choice(monkeypatch, backend, options, way):
    assert chosen(monkeypatch, backend, **options) == way


def test_the_reason_is_logged_once(monkeypatch, caplog):
    kernels._log_fallback.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            chosen(monkeypatch, "gpu", q=512, dtype=jnp.float32)
            chosen(monkeypatch, "tpu", q=500)
    assert [record.getMessage() for record in caplog.records] == [
        "attention does not use the fused cudnn kernel: the type is float32, not bfloat16 or float16",
        "attention does not use the fused splash kernel: lengths 500 and 500 are not multiples of 128",
    ]


def test_places_keep_a_pattern_from_the_kernel_that_goes_by_index(monkeypatch):
    places = jax.ShapeDtypeStruct((1, 4096), np.int32)
    assert chosen(monkeypatch, "tpu", pattern=Local(64) | Global(2), places=places) == "blockwise"
    assert chosen(monkeypatch, "tpu", pattern=WINDOW, places=places) == "splash"  # distances are what they are
    assert chosen(monkeypatch, "tpu", pattern=Full(), places=places) == "splash"


def test_scores_count_for_each_device(monkeypatch):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert chosen(monkeypatch, "cpu", batch=4) == "blockwise"
    assert on_mesh(lambda: chosen(monkeypatch, "cpu", batch=4), mesh)() == "plain"  # 2^26 for each
    assert on_mesh(lambda: chosen(monkeypatch, "cpu", batch=8), mesh)() == "blockwise"
