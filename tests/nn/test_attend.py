"""What `attend` promises, against the formula in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from transformers_jax.nn import Causal, Full, Local, attend, attention_weights, choose_implementation
from transformers_jax.nn.kernels import check_implementation

IMPLEMENTATIONS = ("plain", "xla")
BATCH, Q, K, HEADS, DIM = 2, 5, 7, 4, 6


def arrays(*, q=Q, k=K, kv_heads=HEADS, head_dim=DIM, value_dim=None, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    sizes = (
        (BATCH, q, HEADS, head_dim),
        (BATCH, k, kv_heads, head_dim),
        (BATCH, k, kv_heads, value_dim or head_dim),
    )
    return [jnp.asarray(rng.normal(size=size), dtype) for size in sizes]


def weights_by_formula(query, key, *, mask=True, bias=0.0, scale=None):
    """softmax(scale * query @ key + bias) in float64 where `mask`; zeros where nothing may be seen."""
    query, key, bias = (np.asarray(x, np.float64) for x in (query, key, bias))
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    with np.errstate(invalid="ignore"):
        powers = np.where(mask, np.exp(scores + bias), 0.0)
    total = powers.sum(-1, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)


def by_formula(query, key, value, **kwargs):
    value = np.repeat(np.asarray(value, np.float64), query.shape[2] // value.shape[2], axis=2)
    return np.einsum("bhqk,bkhd->bqhd", weights_by_formula(query, key, **kwargs), value)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.37])
def test_equals_the_formula(implementation, kv_heads, scale):
    """Also with fewer key heads, each of which serves consecutive query heads, and with a scale of one's own."""
    query, key, value = arrays(kv_heads=kv_heads)
    output = attend(query, key, value, scale=scale, implementation=implementation)
    np.testing.assert_allclose(output, by_formula(query, key, value, scale=scale), atol=1e-6)


def test_values_may_have_another_size_than_keys():
    query, key, value = arrays(value_dim=3)
    np.testing.assert_allclose(attend(query, key, value), by_formula(query, key, value), atol=1e-6)
    with pytest.raises(ValueError, match="not 3 and 6; 'plain' serves every call"):
        attend(query, key, value, implementation="xla")


@partial(jax.jit, static_argnames="implementation")
def attend_and_gradients(arguments, mask, bias, implementation):
    def loss(query, key, value, bias):
        return jnp.sum(jnp.sin(attend(query, key, value, mask=mask, bias=bias, implementation=implementation)))

    output = attend(*arguments, mask=mask, bias=bias, implementation=implementation)
    return output, jax.grad(loss, argnums=(0, 1, 2, 3))(*arguments, bias)


@settings(max_examples=60, deadline=None)
@given(
    mask=hnp.arrays(bool, (BATCH, 1, Q, K)),
    bias=hnp.arrays(np.float32, (1, HEADS, Q, K), elements=st.sampled_from([0.0, 1.5, -2.0, -np.inf])),
)
def test_any_mask_and_bias(mask, bias):
    """Equal to the formula; blind queries give zeros; gradients are finite and alike in all implementations."""
    arguments = arrays()
    expected = by_formula(*arguments, mask=mask, bias=bias)
    reference = None
    for implementation in IMPLEMENTATIONS:
        output, gradients = attend_and_gradients(arguments, jnp.asarray(mask), jnp.asarray(bias), implementation)
        np.testing.assert_allclose(output, expected, atol=2e-6)
        assert all(np.isfinite(x).all() for x in gradients)
        reference = gradients if reference is None else reference
        for ours, theirs in zip(gradients, reference, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=5e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("everything", ["mask", "bias"])
def test_blind_queries_give_zeros_and_no_gradient(implementation, everything):
    arguments = arrays()
    mask, bias = np.ones((BATCH, 1, Q, K), bool), np.zeros((1, HEADS, Q, K), np.float32)
    if everything == "mask":
        mask[0, 0, 2] = False
    else:
        bias[0, :, 2] = -np.inf
    output, gradients = attend_and_gradients(arguments, jnp.asarray(mask), jnp.asarray(bias), implementation)
    blind = np.asarray(output)[0, 2] if everything == "mask" else np.asarray(output)[:, 2]
    assert (blind == 0).all() and (np.asarray(output)[:, 3] != 0).all()
    assert all(np.isfinite(x).all() for x in gradients)
    assert (np.asarray(gradients[0])[0, 2] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [(BATCH, 1, 1, K), (1, 1, 1, K), (1, HEADS, Q, K), (BATCH, 1, Q, 1), (1, 1, 1, 1)])
def test_masks_and_biases_broadcast(implementation, size):
    rng = np.random.default_rng(3)
    arguments, mask, bias = arrays(), rng.random(size) < 0.6, rng.normal(size=size).astype(np.float32)
    output = attend(*arguments, mask=jnp.asarray(mask), bias=jnp.asarray(bias), implementation=implementation)
    np.testing.assert_allclose(output, by_formula(*arguments, mask=mask, bias=bias), atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("padding", [None, "left"])
def test_causal(implementation, padding):
    """With padding in front the first queries are blind: by neither the mask nor the pattern, but by both."""
    arguments = arrays(k=Q)
    mask = np.ones((BATCH, 1, 1, Q), bool)
    if padding:
        mask[1, ..., :2] = False
    expected = by_formula(*arguments, mask=mask & np.tril(np.ones((Q, Q), bool)))
    call = partial(attend, *arguments, pattern=Causal(), implementation=implementation)
    np.testing.assert_allclose(call(mask=jnp.asarray(mask) if padding else None), expected, atol=1e-6)
    if padding:
        assert (np.asarray(call(mask=jnp.asarray(mask)))[1, :2] == 0).all()


@partial(jax.jit, static_argnames=("pattern", "implementation"))
def attend_at(arguments, offset, pattern, implementation):
    return attend(*arguments, pattern=pattern, query_offset=offset, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pattern", [Causal(), Local(1), Local(2, dilation=2) & Causal(), Full()])
def test_queries_in_the_middle_of_the_keys(implementation, pattern):
    """A chunk of queries at an offset gives the rows that all queries together give: cached decoding."""
    query, key, value = arrays(q=K)
    rows = np.arange(K)[:, None]
    whole = by_formula(query, key, value, mask=np.asarray(pattern.allows(jnp.asarray(rows), jnp.asarray(rows.T))))
    for offset, length in ((0, 3), (3, 3), (4, 3)):
        part = (query[:, offset : offset + length], key, value)
        chunk = whole[:, offset : offset + length]
        np.testing.assert_allclose(attend_at(part, offset, pattern, implementation), chunk, atol=1e-6)
    one = attend(query[:, 6:], key, value, pattern=pattern, query_offset=6, implementation=implementation)
    np.testing.assert_allclose(one, whole[:, 6:], atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_causal_queries_before_the_first_key_are_blind(implementation):
    output = np.asarray(attend(*arrays(), pattern=Causal(), query_offset=-2, implementation=implementation))
    assert (output[:, :2] == 0).all() and (output[:, 2:] != 0).all()


@pytest.mark.parametrize(
    ("implementation", "dtype"), [("plain", jnp.bfloat16), ("xla", jnp.bfloat16), ("plain", jnp.float16)]
)
def test_softmax_is_float32_for_16_bit_inputs(implementation, dtype):
    """Scores up to about 30, where a 16-bit score would be off by 0.1. The weights are exact to float32; the output
    loses what rounding the weights and the result to 16 bits costs."""
    query, key, value = arrays(q=33, k=65, head_dim=20, dtype=dtype)
    query, key = query * 3, key * 2
    exact = weights_by_formula(query, key)
    weights = attention_weights(query, key)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, exact, atol=1e-5)
    output = attend(query, key, value, implementation=implementation)
    assert output.dtype == dtype
    error = np.abs(np.asarray(output, np.float64) - by_formula(query, key, value)).max()
    assert error < 3 * float(jnp.finfo(dtype).eps)  # values reach about 3


@pytest.mark.parametrize("mask", [None, "rows"])
def test_weights_are_those_that_attend_uses(mask):
    query, key, value = arrays(kv_heads=2)
    mask = None if mask is None else jnp.asarray(np.random.default_rng(1).random((BATCH, HEADS, Q, K)) < 0.4)
    weights = attention_weights(query, key, mask=mask, pattern=Causal(), query_offset=1)
    sums = np.asarray(weights.sum(-1))
    assert np.logical_or(np.abs(sums - 1) < 1e-6, sums == 0).all()
    mixed = np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(value, 2, axis=2))
    np.testing.assert_allclose(attend(query, key, value, mask=mask, pattern=Causal(), query_offset=1), mixed, atol=1e-6)


def test_dropout_on_the_weights_keeps_the_mean_and_follows_its_key():
    query, key, value = arrays()
    run = jax.jit(lambda key_: attend(query, key, value, dropout_rate=0.3, dropout_key=key_))
    keys = jax.random.split(jax.random.key(0), 1000)
    outputs = jax.vmap(run)(keys)
    np.testing.assert_array_equal(run(keys[0]), run(keys[0]))
    assert np.mean(np.asarray(outputs[0]) != np.asarray(outputs[1])) > 0.5
    # The standard error of the mean is at most 0.04; four of them.
    np.testing.assert_allclose(outputs.mean(0), by_formula(query, key, value), atol=0.16)
    np.testing.assert_allclose((outputs.mean(0) - by_formula(query, key, value)).mean(), 0.0, atol=0.005)
    unit = attend(query, key, jnp.ones_like(value), dropout_rate=0.3, dropout_key=keys[0])
    assert np.asarray(unit).std() > 0.1  # it is the weights that are dropped: rows no longer sum to one
    whole = attend(query, key, value)
    np.testing.assert_array_equal(attend(query, key, value, dropout_rate=0.3), whole)
    np.testing.assert_array_equal(attend(query, key, value, dropout_rate=0.0, dropout_key=keys[0]), whole)


def test_no_keys_give_zeros():
    query, key, value = arrays(k=0)
    for implementation in IMPLEMENTATIONS:
        assert (np.asarray(attend(query, key, value, implementation=implementation)) == 0).all()


def test_works_under_vmap():
    query, key, value = arrays()
    expected = attend(query, key, value, pattern=Causal())
    rows = jax.vmap(lambda *x: attend(*(y[None] for y in x), pattern=Causal())[0])(query, key, value)
    np.testing.assert_allclose(rows, expected, atol=1e-6)


def test_what_cannot_be_served_is_a_clear_error():
    query, key, value = arrays()
    with pytest.raises(ValueError, match="'cudnn' cannot serve this call: the backend is cpu, not an NVIDIA GPU"):
        attend(query, key, value, implementation="cudnn")
    with pytest.raises(ValueError, match="'xla' cannot serve this call: it has no dropout"):
        attend(query, key, value, dropout_rate=0.1, dropout_key=jax.random.key(0), implementation="xla")
    with pytest.raises(ValueError, match="'xla' cannot serve this call: it has no float16 on the CPU"):
        attend(*(x.astype(jnp.float16) for x in (query, key, value)), implementation="xla")
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 key heads"):
        attend(query, key[:, :, :3], value[:, :, :3])
    with pytest.raises(ValueError, match="unknown attention implementation 'flash'; there are plain, blockwise"):
        check_implementation("flash")
    assert choose_implementation(query, key, value) == "plain"  # on the CPU
