"""Every number of every head against transformers: BERT, RoBERTa and DistilBERT at odd sizes with large weights."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from bert_reference import CLASSES, FAMILIES, draw, logits_of, make, to_torch  # noqa: E402

from transformers_jax import pretrained  # noqa: E402
from transformers_jax.pretrained import from_pretrained, load_pretrained  # noqa: E402
from transformers_jax.pretrained.engine import export  # noqa: E402


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def assert_close(actual, expected, *, scale=None, message=""):
    """Within 1e-5, relative to the value or to the largest one of the array."""
    expected = expected.detach().numpy() if isinstance(expected, torch.Tensor) else expected
    scale = np.abs(expected).max() if scale is None else scale
    assert np.shape(actual) == np.shape(expected), message
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * scale, err_msg=message)


@partial(jax.jit, static_argnames="capture")
def run(model, inputs, capture=()):
    return model(**inputs, capture=capture)


def loss_of(output, weights):
    """A number that all outputs have a part in, each element with a weight of its own."""
    return sum((value * weight).sum() for value, weight in zip(output, weights, strict=True))


def outputs_of(name, output):
    """What the class `name` gives out, ours or theirs, in the same order."""
    if name.endswith("Model"):
        theirs = hasattr(output, "last_hidden_state")
        hidden = output.last_hidden_state if theirs else output.hidden
        pooled = getattr(output, "pooler_output", None) if theirs else output.pooled
        return [hidden] if pooled is None else [hidden, pooled]
    if hasattr(output, "hidden"):
        both = name.endswith("PreTraining")
        return [output.logits, output.next_sentence_logits] if both else [output.logits]
    if name.endswith("PreTraining"):
        return [output.prediction_logits, output.seq_relationship_logits]
    return [logits_of(output)]


@pytest.mark.parametrize("name", CLASSES)
def test_outputs_and_gradients(name, tmp_path):
    inputs = draw(name)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradients_and_output(model, inputs, weights):
        output = model(**inputs, capture=("hidden_states", "attention_weights"))
        return loss_of(outputs_of(name, output), weights), output

    reference = make(name)
    with torch.no_grad():
        expected = reference(**to_torch(inputs), output_hidden_states=True, output_attentions=True)
    theirs = outputs_of(name, expected)
    assert len(theirs) == (2 if name in ("BertForPreTraining", "BertModel", "RobertaModel") else 1)
    weights = [np.random.default_rng(1).normal(size=value.shape).astype(np.float32) for value in theirs]
    reference.save_pretrained(tmp_path / "outputs")
    loaded = load_pretrained(tmp_path / "outputs")
    assert (loaded.architecture, loaded.new, loaded.unused) == (name, (), ())
    _, output = gradients_and_output(loaded.model, inputs, weights)
    states = np.concatenate([output.hidden_states, output.hidden[None]])
    for layer, (state, other) in enumerate(zip(states, expected.hidden_states, strict=True)):
        assert_close(state, other, message=f"hidden states {layer}")
    for layer, (attention, other) in enumerate(zip(output.attention_weights, expected.attentions, strict=True)):
        assert_close(attention, other, message=f"attention weights {layer}")
    for value, other in zip(outputs_of(name, output), theirs, strict=True):
        assert value.dtype == jnp.float32
        assert_close(value, other)

    # PyTorch's own gradients in float32 are off by 1e-5 at this size of weights: smaller ones, and float64.
    reference = make(name, std=0.3)
    reference.save_pretrained(tmp_path / "gradients")
    model = from_pretrained(tmp_path / "gradients")
    reference.double()
    loss_of(outputs_of(name, reference(**to_torch(inputs))), [torch.tensor(w).double() for w in weights]).backward()
    expected = {key: value.grad.numpy() for key, value in reference.named_parameters()}
    gradients, _ = gradients_and_output(model, inputs, weights)
    family, architecture = pretrained._layout(model)
    sizes, read = export(family, architecture, gradients)
    assert set(sizes) == set(expected)
    for key, gradient in expected.items():
        # The key's bias has no effect on the softmax: its gradient is rounding, to be measured by its kernel's.
        scale = np.abs(expected[re.sub(r"(key|k_lin)\.bias", r"\1.weight", key)]).max()
        assert_close(read(key), gradient, scale=scale, message=key)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_any_side_gives_what_the_unpadded_row_gives(family, tmp_path):
    """Oracle: transformers on the row alone, as its own BERT gives something else for one padded on the left."""
    reference = make(family + "Model", std=0.3)
    reference.save_pretrained(tmp_path)
    model, inputs = from_pretrained(tmp_path), draw(family, batch=1, length=9)
    with torch.no_grad():
        expected = reference(**to_torch(inputs))
    for left, right in ((0, 4), (4, 0), (3, 1)):
        padded = {key: np.pad(value, ((0, 0), (left, right)), constant_values=1) for key, value in inputs.items()}
        mask = np.pad(np.ones((1, 9), np.int32), ((0, 0), (left, right)))
        output = run(model, padded | {"attention_mask": mask})
        assert_close(output.hidden[:, left : left + 9], expected.last_hidden_state)
        if family != "DistilBert":
            assert_close(output.pooled, expected.pooler_output)


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_batches_on_the_right(family, tmp_path):
    """Rows of several lengths in one batch, padded as transformers pads them."""
    name = family + "ForSequenceClassification"
    reference, inputs = make(name), draw(family, batch=3)
    reference.save_pretrained(tmp_path)
    mask = (np.arange(13) < np.array([[13], [1], [6]])).astype(np.int32)
    inputs["input_ids"] = np.where(mask, inputs["input_ids"], reference.config.pad_token_id)
    inputs["attention_mask"] = mask
    with torch.no_grad():
        expected = reference(**to_torch(inputs)).logits
    assert_close(run(from_pretrained(tmp_path), inputs).logits, expected)


@pytest.mark.parametrize(("family", "activation"), [("Bert", "gelu_new"), ("Bert", "relu"), ("DistilBert", "silu")])
def test_other_activations_in_layers_and_head(family, activation, tmp_path):
    field = {"activation" if family == "DistilBert" else "hidden_act": activation}
    reference, inputs = make(family + "ForMaskedLM", **field), draw(family)
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(**to_torch(inputs)).logits
    assert_close(run(from_pretrained(tmp_path), inputs).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_untied_output_layer(family, tmp_path):
    reference, inputs = make(family + "ForMaskedLM", tie_word_embeddings=False), draw(family)
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(**to_torch(inputs)).logits
    loaded = load_pretrained(tmp_path)
    assert loaded.model.head is not None and loaded.new == ()
    assert_close(run(loaded.model, inputs).logits, expected)
