"""`attend` against PyTorch's scaled_dot_product_attention and the official ONNX Attention cases."""

import re
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformers_jax.nn import Causal, Full, KVCache, Local, Pattern, attend, attention_weights

IMPLEMENTATIONS = ("plain", "xla")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ["full", "causal", "mask", "bias", "grouped", "scale"])
def test_pytorch(implementation, case):
    """Outputs and gradients, odd sizes."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    q, k = (7, 7) if case == "causal" else (5, 9)
    kv_heads = 2 if case == "grouped" else 6
    arrays = [rng.normal(size=(3, n, h, 10)).astype(np.float32) for n, h in ((q, 6), (k, kv_heads), (k, kv_heads))]
    target = rng.normal(size=(3, q, 6, 10)).astype(np.float32)
    ours, theirs = {}, {}
    if case == "mask":
        mask = rng.random((3, 1, q, k)) < 0.6
        mask[..., 0] = True  # PyTorch gives NaN or zeros, by version, where nothing may be seen
        ours, theirs = dict(mask=jnp.asarray(mask)), dict(attn_mask=torch.tensor(mask))
    elif case == "bias":
        bias = rng.normal(size=(1, 6, q, k)).astype(np.float32)
        ours, theirs = dict(bias=jnp.asarray(bias)), dict(attn_mask=torch.tensor(bias))
    elif case == "causal":
        ours, theirs = dict(pattern=Causal()), dict(is_causal=True)
    elif case == "grouped":
        theirs = dict(enable_gqa=True)
    elif case == "scale":
        ours, theirs = dict(scale=0.3), dict(scale=0.3)

    def loss(*x):
        output = attend(*x, **ours, implementation=implementation)
        return jnp.sum(output * target), output

    gradients, output = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*map(jnp.asarray, arrays))
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    reference = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors), **theirs)
    (reference.transpose(1, 2) * torch.tensor(target)).sum().backward()
    np.testing.assert_allclose(output, reference.detach().transpose(1, 2), atol=1e-5)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad, atol=1e-5)


# What the ONNX operator has and `attend` does not. Every other case is run.
NOT_OFFERED = {
    r"softcap": "attend has no soft cap on the scores (Gemma 2); no family here needs one",
    r"local_window_gqa_rank4_mask": "has a soft cap as well, though its name does not say so",
}


@dataclass(frozen=True)
class Window(Pattern):
    """ONNX's window: `left` keys before, `right` keys after; -1 is no limit. A pattern of one's own."""

    left: int
    right: int

    def allows(self, query, key):
        left = jnp.bool_(True) if self.left < 0 else key >= query - self.left
        right = jnp.bool_(True) if self.right < 0 else key <= query + self.right
        return jnp.broadcast_to(left & right, (query.shape[0], key.shape[1]))


def onnx_cases() -> dict:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # collecting runs every operator's numpy reference
            from onnx.backend.test.case.node import collect_testcases

            cases = collect_testcases("Attention")
    except ImportError:
        return {}
    return {case.name: case for case in cases if not case.name.endswith("_expanded")}


CASES = onnx_cases()


def test_onnx_cases_are_there_and_all_accounted_for():
    pytest.importorskip("onnx")
    left_out = [name for name in CASES if any(re.search(word, name) for word in NOT_OFFERED)]
    with_softcap = [name for name, case in CASES.items() if read(case)[0].get("softcap")]
    assert sorted(left_out) == sorted(with_softcap)  # nothing is dropped for any other reason
    assert len(CASES) - len(left_out) >= 79


def read(case):
    """Attributes, inputs by name and outputs by name of a case."""
    from onnx import helper

    node = case.model.graph.node[0]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    inputs, outputs = case.data_sets[0]
    named = dict(zip([x for x in node.input if x], inputs, strict=True))
    return attributes, named, dict(zip([x for x in node.output if x], outputs, strict=True))


# One compilation for all cases of one shape; the eager operations would be compiled one by one.
attend_jitted = jax.jit(attend, static_argnames=("pattern", "query_offset", "scale", "implementation"))


def split_heads(x, heads: int | None):
    """ONNX's (batch, heads, length, dim), or (batch, length, heads * dim), as (batch, length, heads, dim)."""
    return np.swapaxes(x, 1, 2) if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1)


def to_mask_and_bias(attn_mask, keys: int):
    """ONNX's mask, which is boolean or added, of 1 to 4 axes; shorter ones are padded with "may not look"."""
    if attn_mask is None:
        return {}
    attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
    missing = [(0, 0)] * 3 + [(0, max(0, keys - attn_mask.shape[-1]))]
    if attn_mask.dtype == bool:
        return dict(mask=jnp.asarray(np.pad(attn_mask, missing)))
    return dict(bias=jnp.asarray(np.pad(attn_mask.astype(np.float32), missing, constant_values=-np.inf)))


@pytest.mark.parametrize("name", [n for n in CASES if not any(re.search(word, n) for word in NOT_OFFERED)])
def test_onnx(name):
    attributes, inputs, outputs = read(CASES[name])
    query = split_heads(inputs["Q"], attributes.get("q_num_heads"))
    key, value = (split_heads(inputs[x], attributes.get("kv_num_heads")) for x in "KV")
    offset = 0
    if "past_key" in inputs:  # a cache that is full so far, with room for the new keys
        past_key, past_value = inputs["past_key"], inputs["past_value"]
        offset, new = past_key.shape[2], key.shape[1]
        room = [(0, 0), (0, 0), (0, new), (0, 0)]
        cache = KVCache(jnp.asarray(np.pad(past_key, room)), jnp.asarray(np.pad(past_value, room)))
        cache = cache.write(KVCache(*(jnp.asarray(np.swapaxes(x, 1, 2)) for x in (key, value))), offset)
        np.testing.assert_array_equal(cache.key, outputs["present_key"])
        np.testing.assert_array_equal(cache.value, outputs["present_value"])
        key, value = (np.swapaxes(x, 1, 2) for x in (cache.key, cache.value))

    pattern: Pattern = Causal() if attributes.get("is_causal") else Full()
    left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    if attributes.get("is_causal") and left >= 0:
        pattern = Local(left) & Causal()
    elif (left, right) != (-1, -1):
        pattern = pattern & Window(left, right)

    arguments = to_mask_and_bias(inputs.get("attn_mask"), key.shape[1])
    if "nonpad_kv_seqlen" in inputs:
        # Rows with different numbers of keys: the queries of a row stand at the end of its keys when causal. An
        # offset for each row is what masks are for.
        counts = inputs["nonpad_kv_seqlen"]
        starts = [int(n) - query.shape[1] for n in counts]
        masks = np.stack([pattern.mask(query.shape[1], key.shape[1], offset=start) for start in starts])
        masks = masks & (np.arange(key.shape[1]) < counts[:, None, None])
        arguments["mask"] = jnp.asarray(masks[:, None] & np.asarray(arguments.get("mask", True)))
        pattern = Full()

    tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[query.dtype.name]
    expected = split_heads(outputs["Y"], attributes.get("q_num_heads"))
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    arguments |= dict(pattern=pattern, query_offset=offset, scale=attributes.get("scale"))
    also_xla = value.shape[-1] == query.shape[-1] and query.dtype != jnp.float16  # what 'xla' refuses, on the CPU
    for implementation in IMPLEMENTATIONS if also_xla else ("plain",):
        output = attend_jitted(query, key, value, **arguments, implementation=implementation)
        difference = np.abs(np.asarray(output, np.float64) - expected.astype(np.float64)).max()
        assert difference < tolerance, implementation
    if attributes.get("qk_matmul_output_mode") == 3:  # the weights
        weights = attention_weights(query, key, **arguments)
        theirs = outputs["qk_matmul_output"].astype(np.float64)
        np.testing.assert_allclose(np.asarray(weights, np.float64), theirs, atol=tolerance)
