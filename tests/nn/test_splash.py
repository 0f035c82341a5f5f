"""JAX's fused kernel for TPUs, interpreted, equals the plain computation: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformers_jax.nn import Causal, Full, Global, Local, Random, Strided, attend

PATTERNS = [
    Full(),
    Causal(),
    Local(40) & Causal(),
    Local(9, dilation=3) | Global(2),
    Strided(7) & Causal(),
    Random(1, 256, block=64),
]


def arrays(q=256, k=256, heads=4, kv_heads=2, head_dim=16, value_dim=24):
    random = np.random.default_rng(0)
    sizes = ((q, heads, head_dim), (k, kv_heads, head_dim), (k, kv_heads, value_dim))
    return tuple(jnp.asarray(random.normal(size=(2, *size)), jnp.float32) for size in sizes)


def results(implementation, query, key, value, **options):
    """Values, and the gradients of a weighted sum of them."""
    weigh = jnp.asarray(np.random.default_rng(1).normal(size=(*query.shape[:3], value.shape[-1])), jnp.float32)

    @jax.jit
    def run(query, key, value):
        def total(*given):
            output = attend(*given, implementation=implementation, **options)
            return jnp.sum(output * weigh), output

        (_, output), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)
        return output, gradients

    return run(query, key, value)


def compare(given, **options):
    for one, other in zip(
        *(jax.tree.leaves(results(name, *given, **options)) for name in ("splash", "plain")), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_patterns(pattern):
    compare(arrays(), pattern=pattern)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("segments", [False, True])
def test_padding_and_segments(padding, segments):
    """Some queries see nothing: zeros, as of the plain computation."""
    real = np.ones((2, 256), bool)
    real[1, :77] = False
    mask = jnp.asarray(real[:, ::-1] if padding == "right" else real)[:, None, None]
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (2, 256)))) if segments else None
    compare(arrays(), pattern=Causal(), mask=mask, segment_ids=ids)


def test_another_number_of_keys():
    compare(arrays(q=128, k=384))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(query_offset=2), "the first query does not stand at index 0"),
        (dict(bias=jnp.zeros((1, 1, 256, 256))), "there is a bias"),
        (dict(mask=jnp.ones((1, 1, 256, 256), bool)), "the mask is not one over keys"),
        (dict(dropout_rate=0.1, dropout_key=jax.random.key(0)), "there is dropout on the weights"),
        (dict(pattern=Global(1), places=jnp.zeros((2, 256), int)), "its pattern goes by places"),
    ],
)
def test_what_it_cannot_serve_is_refused(options, reason):
    with pytest.raises(ValueError, match=f"'splash' cannot serve this call: {reason}"):
        attend(*arrays(), implementation="splash", **options)
    with pytest.raises(ValueError, match="lengths 250 and 256 are not multiples of 128"):
        attend(*arrays(q=250), implementation="splash")
