"""An odd relative of Image GPT, read with the blocks: a published model whose layers go on from the normalised values.

Its start is a vector of its own before the embeddings of all pixels but the last, its norms are ordinary layer norms,
its GELU the exact one; and after the first norm of a layer the residual connection takes what is normalised:
`x = norm(x); x = x + attention(x); x = x + mlp(norm(x))`. The weights came with logits of a few pictures and
the log-likelihood of more, computed by the code that trained it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformers_jax import nn

HEADS = 2


@pytest.fixture(scope="module")
def files(shared_data):
    folder = shared_data / "imagegpt_mnist"
    return dict(np.load(folder / "weights_mnist.npz")), dict(np.load(folder / "golden_mnist.npz"))


def layer_norm(x, weights, name):
    centred = x - x.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normal * weights[name + ".weight"] + weights[name + ".bias"]


def logits_of(weights, pixels):
    batch, length = pixels.shape
    start = jnp.broadcast_to(weights["sos"], (batch, 1, 16))
    x = jnp.concatenate([start, weights["token_embeddings.weight"][pixels[:, :-1]]], axis=1)
    x = x + weights["position_embeddings.weight"]
    for layer in range(8):
        name = f"layers.{layer}."
        x = layer_norm(x, weights, name + "ln_1")
        fused = x @ weights[name + "attn.in_proj_weight"].T + weights[name + "attn.in_proj_bias"]
        query, key, value = (part.reshape(batch, length, HEADS, -1) for part in jnp.split(fused, 3, axis=-1))
        attended = nn.attend(query, key, value, pattern=nn.Causal()).reshape(batch, length, -1)
        x = x + attended @ weights[name + "attn.out_proj.weight"].T + weights[name + "attn.out_proj.bias"]
        inside = layer_norm(x, weights, name + "ln_2") @ weights[name + "mlp.0.weight"].T + weights[name + "mlp.0.bias"]
        inside = nn.ACTIVATIONS["gelu"](inside)
        x = x + inside @ weights[name + "mlp.2.weight"].T + weights[name + "mlp.2.bias"]
    return layer_norm(x, weights, "ln_f") @ weights["head.weight"].T


def test_logits_and_likelihoods_of_the_published_model(files):
    weights, golden = files
    weights = jax.tree.map(jnp.asarray, weights)
    pixels = jnp.asarray(golden["tokens"].astype(np.int32))[:8]
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(logits_of)(weights, pixels)
    expected = golden["logits_first4"]
    # The last norm and the output layer sum values of up to 15: 1e-5 of that.
    np.testing.assert_allclose(logits[:4], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    log_probs = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(log_probs, pixels[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses.mean(axis=1), golden["nll_per_image"][:8], rtol=1e-5)
