"""The recurrent layers against torch.nn.LSTM and torch.nn.GRU, packed sequences of unequal lengths and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.models.recurrent_seq2seq import Encoder, RecurrentSeq2SeqConfig

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


def copied(cell, reference, name, kind):
    """Torch's weights of one layer and direction into a cell. Torch adds two biases where Flax has one."""
    parts = {part: getattr(reference, f"{part}_{name}") for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    with torch.no_grad():
        parts["bias_ih" if kind == "lstm" else "bias_hh"].zero_()
    weights = {part: jnp.asarray(x.detach().numpy()) for part, x in parts.items()}
    cell.dense_i.kernel[...], cell.dense_h.kernel[...] = weights["weight_ih"].T, weights["weight_hh"].T
    if kind == "lstm":
        cell.dense_h.bias[...] = weights["bias_hh"]
    else:
        cell.dense_i.bias[...] = weights["bias_ih"]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_layers_and_their_gradients_are_torchs(kind, bidirectional):
    dim, depth, lengths = 6, 3, [7, 4, 1]
    config = RecurrentSeq2SeqConfig(dim=dim, depth=depth, cell=kind, bidirectional=bidirectional, dropout=0.0)
    encoder = Encoder(config, rngs=nnx.Rngs(0))
    width = dim // 2 if bidirectional else dim
    torch.manual_seed(0)
    make = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind]
    reference = make(dim, width, depth, batch_first=True, bidirectional=bidirectional)
    for i in range(depth):
        copied(encoder.forward[i], reference, f"l{i}", kind)
        if bidirectional:
            copied(encoder.backward[i], reference, f"l{i}_reverse", kind)

    random = np.random.default_rng(0)
    inputs, factor = random.normal(size=(3, 7, dim)).astype("f"), random.normal(size=(3, 7, dim)).astype("f")
    real = np.arange(7) < np.array(lengths)[:, None]
    tensor = torch.tensor(inputs, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(tensor, lengths, batch_first=True)
    expected, last = reference(packed)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(expected, batch_first=True)
    (expected * torch.tensor(factor * real[..., None])).sum().backward()

    for shift in (0, 2):  # padding behind, and some of it in front
        rolled = [jnp.pad(jnp.asarray(x), ((0, 0), (shift, 0)) + ((0, 0),) * (x.ndim - 2)) for x in (inputs, real)]

        def loss(encoder, given, real, shift=shift):
            hidden = encoder(given, real)
            return jnp.sum(hidden[:, shift:] * factor * real[:, shift:, None]), hidden

        (gradients, given_gradient), hidden = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(encoder, *rolled)
        np.testing.assert_allclose(hidden[:, shift:][real], expected.detach().numpy()[real], atol=1e-5)
        np.testing.assert_allclose(given_gradient[:, shift:], tensor.grad.numpy(), atol=1e-5)
        # The last states of a row stand at the ends, whatever its length.
        state = (last[0] if kind == "lstm" else last).detach().numpy()
        np.testing.assert_allclose(hidden[:, -1, :width], state[-2 if bidirectional else -1], atol=1e-5)
        if bidirectional:
            np.testing.assert_allclose(hidden[:, 0, width:], state[-1], atol=1e-5)
        for i in range(depth):
            for cells, suffix in ((gradients.forward, ""), (gradients.backward, "_reverse")):
                if cells is not None:
                    for dense, part in (("dense_i", "weight_ih"), ("dense_h", "weight_hh")):
                        found = getattr(cells[i], dense).kernel[...].T
                        wanted = getattr(reference, f"{part}_l{i}{suffix}").grad.numpy()
                        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=f"{part} {i}{suffix}")
                    bias = cells[i].dense_h.bias if kind == "lstm" else cells[i].dense_i.bias
                    wanted = getattr(reference, f"bias_ih_l{i}{suffix}").grad.numpy()
                    np.testing.assert_allclose(bias[...], wanted, atol=1e-5)
