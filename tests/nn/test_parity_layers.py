"""The blocks against PyTorch's modules with the same weights: outputs and gradients, odd sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.nn import ACTIVATIONS, LayerNorm, MultiHeadAttention, TransformerLayer

torch = pytest.importorskip("torch")

BATCH, LENGTH, CONTEXT, DIM, HEADS, MLP = 3, 5, 8, 12, 3, 26


def random(*size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def randomized(module):
    """Every weight of a torch module, biases and norms too, drawn so that it matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise + 1 if "norm" in name and name.endswith("weight") else noise)
    return module.eval()


def set_linear(ours, weight, bias, convert):
    ours.kernel[...], ours.bias[...] = convert(weight.T), convert(bias)


def copy_attention(ours, theirs, convert=lambda x: jnp.asarray(x.detach().numpy())):
    for i, part in enumerate((ours.query, ours.key, ours.value)):
        weight = theirs.in_proj_weight.chunk(3)[i] if theirs.in_proj_weight is not None else None
        weight = weight if weight is not None else (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)[i]
        set_linear(part, weight, theirs.in_proj_bias.chunk(3)[i], convert)
    set_linear(ours.output, theirs.out_proj.weight, theirs.out_proj.bias, convert)


def copy_layer(ours, theirs, convert=lambda x: jnp.asarray(x.detach().numpy())):
    copy_attention(ours.attention, theirs.self_attn, convert)
    norms = [ours.attention_norm, ours.mlp_norm]
    if ours.cross_attention is not None:
        copy_attention(ours.cross_attention, theirs.multihead_attn, convert)
        norms.insert(1, ours.cross_attention_norm)
    for i, norm in enumerate(norms, 1):
        reference = getattr(theirs, f"norm{i}")
        norm.scale[...], norm.bias[...] = convert(reference.weight), convert(reference.bias)
    set_linear(ours.mlp.up, theirs.linear1.weight, theirs.linear1.bias, convert)
    set_linear(ours.mlp.down, theirs.linear2.weight, theirs.linear2.bias, convert)


def compare(ours, theirs, copy, run, inputs, reference_output, tensors):
    """Outputs, input gradients and parameter gradients of sum(output * target) are equal."""
    target = random(*reference_output.shape, seed=9)

    def loss(module, inputs):
        output = run(module, *inputs)
        return jnp.sum(output * target), output

    (gradients, input_gradients), output = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(ours, inputs)
    (reference_output * torch.tensor(target)).sum().backward()
    np.testing.assert_allclose(output, reference_output.detach(), atol=1e-5, rtol=1e-5)
    for gradient, tensor in zip(input_gradients, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad, atol=2e-5, rtol=1e-5)
    expected = jax.tree.map(jnp.zeros_like, ours)
    for parameter in theirs.parameters():  # read the reference's gradients through the same mapping as its weights
        parameter.data = parameter.grad
    copy(expected, theirs)
    for (path, gradient), reference in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(gradient, reference, atol=3e-5, rtol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("cross", [False, True])
def test_multi_head_attention(cross):
    """With key padding; cross-attention has keys of another width."""
    width = 7 if cross else DIM
    theirs = randomized(torch.nn.MultiheadAttention(DIM, HEADS, kdim=width, vdim=width, batch_first=True))
    ours = MultiHeadAttention(DIM, HEADS, context_dim=width, rngs=nnx.Rngs(0))
    copy_attention(ours, theirs)
    hidden, context = random(BATCH, LENGTH, DIM), random(BATCH, CONTEXT, width, seed=1)
    padding = np.arange(CONTEXT if cross else LENGTH)[None] >= np.array([4, 5, 3])[:, None]  # True is padding, in torch
    tensors = [torch.tensor(x, requires_grad=True) for x in ((hidden, context) if cross else (hidden,))]
    keys = tensors[-1]
    expected, weights = theirs(
        tensors[0], keys, keys, key_padding_mask=torch.tensor(padding), average_attn_weights=False
    )
    mask = jnp.asarray(~padding)[:, None, None, :]

    def run(module, hidden, context=None):
        return module(hidden, context=context, mask=mask).hidden

    captured = ours(
        jnp.asarray(hidden), context=jnp.asarray(context) if cross else None, mask=mask, capture_weights=True
    )
    np.testing.assert_allclose(captured.weights, weights.detach(), atol=1e-6)
    compare(ours, theirs, copy_attention, run, [jnp.asarray(x.detach()) for x in tensors], expected, tensors)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_encoder_layer(norm, activation):
    theirs = randomized(
        torch.nn.TransformerEncoderLayer(
            DIM, HEADS, MLP, activation=activation, norm_first=norm == "pre", batch_first=True, layer_norm_eps=1e-3
        )
    )
    ours = TransformerLayer(
        DIM, HEADS, MLP, norm=norm, activation=activation, norm_epsilon=1e-3, rngs=nnx.Rngs(0)
    )  # fmt: skip
    copy_layer(ours, theirs)
    padding = np.arange(LENGTH)[None] >= np.array([4, 5, 2])[:, None]
    tensor = torch.tensor(random(BATCH, LENGTH, DIM), requires_grad=True)
    expected = theirs(tensor, src_key_padding_mask=torch.tensor(padding))

    def run(layer, hidden):
        return layer(hidden, mask=jnp.asarray(~padding)[:, None, None, :]).hidden

    compare(ours, theirs, copy_layer, run, [jnp.asarray(tensor.detach())], expected, [tensor])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_decoder_layer(norm):
    """Causal self-attention, cross-attention over a padded context."""
    theirs = randomized(
        torch.nn.TransformerDecoderLayer(DIM, HEADS, MLP, norm_first=norm == "pre", batch_first=True)
    )  # fmt: skip
    ours = TransformerLayer(
        DIM, HEADS, MLP, norm=norm, activation="relu", cross_attention=True, rngs=nnx.Rngs(0)
    )  # fmt: skip
    copy_layer(ours, theirs)
    padding = np.arange(CONTEXT)[None] >= np.array([8, 3, 5])[:, None]
    tensors = [torch.tensor(x, requires_grad=True) for x in (random(BATCH, LENGTH, DIM), random(BATCH, CONTEXT, DIM))]
    blocked = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
    expected = theirs(*tensors, tgt_mask=blocked, memory_key_padding_mask=torch.tensor(padding))

    def run(layer, hidden, context):
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None, None]
        context_mask = jnp.asarray(~padding)[:, None, None, :]
        return layer(hidden, mask=mask, context=context, context_mask=context_mask).hidden

    compare(ours, theirs, copy_layer, run, [jnp.asarray(x.detach()) for x in tensors], expected, tensors)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name):
    reference = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "tanh": torch.tanh,
    }[name]
    x = np.linspace(-7, 7, 1001)
    expected = reference(torch.tensor(x)).numpy()  # float64
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), expected, atol=1e-6)


def test_layer_norm():
    theirs = randomized(torch.nn.LayerNorm(11, eps=1e-3).double())
    ours = LayerNorm(11, epsilon=1e-3, rngs=nnx.Rngs(0))
    ours.scale[...], ours.bias[...] = (jnp.asarray(x.detach().float().numpy()) for x in (theirs.weight, theirs.bias))
    x = random(4, 3, 11)
    np.testing.assert_allclose(ours(jnp.asarray(x)), theirs(torch.tensor(x).double()).detach(), atol=2e-6)
