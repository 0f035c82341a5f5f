"""Every number of ViT and DeiT against transformers: odd sizes, large weights, and images of any size."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vit_reference import CLASSES, draw, make, to_torch  # noqa: E402

from transformers_jax import pretrained  # noqa: E402
from transformers_jax.nn import resize_positions  # noqa: E402
from transformers_jax.pretrained import from_pretrained, load_pretrained  # noqa: E402
from transformers_jax.pretrained.engine import export  # noqa: E402

CAPTURE = ("hidden_states", "attention_weights")


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def assert_close(actual, expected, *, scale=None, message=""):
    """Within 1e-5, relative to the value or to the largest one of the array."""
    expected = expected.detach().numpy() if isinstance(expected, torch.Tensor) else np.asarray(expected)
    scale = np.abs(expected).max() if scale is None else scale
    assert np.shape(actual) == np.shape(expected), message
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * scale, err_msg=message)


@partial(jax.jit, static_argnames="capture")
def run(model, pixels, capture=()):
    return model(pixels, capture=capture)


def loss_of(output, weights):
    """A number that all outputs have a part in, each element with a weight of its own."""
    return sum((value * weight).sum() for value, weight in zip(output, weights, strict=True))


def outputs_of(name, output, *, pooler=True):
    """What the class `name` gives out, ours or theirs, in the same order."""
    if "Classification" in name:
        return [output.logits]
    theirs = hasattr(output, "last_hidden_state")
    hidden = [output.last_hidden_state if theirs else output.hidden]
    return hidden if not pooler else [*hidden, output.pooler_output if theirs else output.pooled]


def compare(model, reference, pixels, **options):
    """Hidden states of all layers, attention weights and every output, of one pass of each."""
    name = type(reference).__name__
    with torch.no_grad():
        expected = reference(to_torch(pixels), output_hidden_states=True, output_attentions=True, **options)
    output = run(model, pixels, CAPTURE)
    backbone = getattr(model, "backbone", model)
    # transformers' last state is that before the final norm, of which we give the normed one.
    for layer, state in enumerate(output.hidden_states):
        assert_close(state, expected.hidden_states[layer], message=f"hidden states {layer}")
    assert len(output.hidden_states) == len(expected.hidden_states) - 1
    assert_close(output.hidden, backbone.norm(jnp.asarray(expected.hidden_states[-1].numpy())))
    for layer, (attention, other) in enumerate(zip(output.attention_weights, expected.attentions, strict=True)):
        assert_close(attention, other, message=f"attention weights {layer}")
    pooler = name.endswith("Model") and reference.pooler is not None
    for value, other in zip(
        outputs_of(name, output, pooler=pooler), outputs_of(name, expected, pooler=pooler), strict=True
    ):
        assert value.dtype == jnp.float32
        assert_close(value, other)


@pytest.mark.parametrize("name", CLASSES)
def test_outputs_and_gradients(name, tmp_path):
    pixels = draw()
    reference = make(name)
    reference.save_pretrained(tmp_path / "outputs")
    loaded = load_pretrained(tmp_path / "outputs")
    assert (loaded.architecture, loaded.new, loaded.unused) == (name, (), ())
    compare(loaded.model, reference, pixels)

    # As for BERT: PyTorch's own gradients in float32 are no reference at 1e-5.
    reference = make(name, std=0.3)
    reference.save_pretrained(tmp_path / "gradients")
    model = from_pretrained(tmp_path / "gradients")
    reference.double()
    theirs = outputs_of(name, reference(to_torch(pixels).double()))
    weights = [np.random.default_rng(1).normal(size=value.shape).astype(np.float32) for value in theirs]
    loss_of(theirs, [torch.tensor(weight).double() for weight in weights]).backward()
    expected = {key: value.grad.numpy() for key, value in reference.named_parameters()}
    gradients = jax.jit(jax.grad(lambda model, x: loss_of(outputs_of(name, model(x)), weights)))(model, pixels)
    family, architecture = pretrained._layout(model)
    sizes, read = export(family, architecture, gradients)
    names = {as_in_files(key): key for key in expected}
    assert set(sizes) == set(names)
    for key in sizes:
        # The key's bias has no effect on the softmax: its gradient is rounding, to be measured by its kernel's.
        scale = np.abs(expected[re.sub(r"k_proj\.bias", "k_proj.weight", names[key])]).max()
        assert_close(read(key), expected[names[key]], scale=scale, message=key)


def as_in_files(name):
    """The name in files of a parameter of transformers 5."""
    for new, old in (
        ("layers.", "encoder.layer."),
        *((f".attention.{x[0]}_proj.", f".attention.attention.{x}.") for x in ("query", "key", "value")),
        (".attention.o_proj.", ".attention.output.dense."),
        (".mlp.fc1.", ".intermediate.dense."),
        (".mlp.fc2.", ".output.dense."),
    ):
        name = name.replace(new, old)
    return name


@pytest.mark.parametrize("name", ["ViTModel", "DeiTModel"])
def test_without_pooler(name, tmp_path):
    reference = make(name, pooler=False)
    reference.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert model.pooler is None
    compare(model, reference, draw())
    output = run(model, draw())
    np.testing.assert_array_equal(output.pooled, output.hidden[:, 0])


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("ViTForImageClassification", size) for size in ((12, 12), (18, 18), (6, 6), (24, 6))),
        *(("DeiTForImageClassificationWithTeacher", size) for size in ((15, 15), (21, 9))),
        *(("ViTModel", (3, 30)), ("DeiTModel", (9, 6))),
    ],
)
def test_images_of_another_size(name, size, tmp_path):
    """Bigger, smaller, not square, and (24 x 6) as many patches as the model was made for but laid out otherwise."""
    reference = make(name)
    reference.save_pretrained(tmp_path)
    compare(from_pretrained(tmp_path), reference, draw(*size), interpolate_pos_encoding=True)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTModel"])
def test_made_for_images_that_are_not_square(name, tmp_path):
    reference = make(name, image_size=[9, 15])
    reference.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert model.config.image_size == (9, 15) and model.config.grid == (3, 5)
    compare(model, reference, draw(9, 15))


@pytest.mark.parametrize("name", ["ViTModel", "DeiTForImageClassificationWithTeacher"])
def test_patches_that_are_not_square_and_grey_images(name, tmp_path):
    reference = make(name, image_size=[12, 15], patch_size=[2, 5], num_channels=1)
    reference.save_pretrained(tmp_path)
    compare(from_pretrained(tmp_path), reference, draw(12, 15, channels=1))


def test_another_size_of_a_model_for_images_that_are_not_square(tmp_path):
    """transformers takes every old grid for a square; its positions are therefore resized here by PyTorch itself."""
    reference = make("ViTForImageClassification", image_size=[9, 15])
    reference.save_pretrained(tmp_path)
    table = reference.vit.embeddings.position_embeddings
    grid = table[:, 1:].reshape(1, 3, 5, -1).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, size=(6, 2), mode="bicubic", align_corners=False)
    resized = torch.cat([table[:, :1], grid.permute(0, 2, 3, 1).reshape(1, 12, -1)], dim=1)
    other = make("ViTForImageClassification", image_size=[18, 6])
    other.load_state_dict(reference.state_dict() | {"vit.embeddings.position_embeddings": resized.detach()})
    compare(from_pretrained(tmp_path), other, draw(18, 6))

    # Resized once and for all where the configuration is given another size.
    model = from_pretrained(tmp_path, changes={"image_size": (18, 6)})
    assert model.config.grid == (6, 2)
    assert_close(model.backbone.positions.embedding[...], resized[0])
    compare(model, other, draw(18, 6))
    table = jnp.asarray(table.detach().numpy()[0])
    assert_close(resize_positions(table, (3, 5), (6, 2), prefix=1), resized[0])


@pytest.mark.parametrize("activation", ["gelu_new", "quick_gelu"])
def test_other_activations(activation, tmp_path):
    reference = make("ViTForImageClassification", hidden_act=activation)
    reference.save_pretrained(tmp_path)
    compare(from_pretrained(tmp_path), reference, draw())
