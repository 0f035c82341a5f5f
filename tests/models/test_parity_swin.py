"""Every number of Swin against transformers: odd sizes, large weights, and images of any size."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from swin_reference import CLASSES, make  # noqa: E402
from vit_reference import draw, to_torch  # noqa: E402

from transformers_jax import pretrained  # noqa: E402
from transformers_jax.pretrained import from_pretrained, load_pretrained  # noqa: E402
from transformers_jax.pretrained.engine import export  # noqa: E402


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


def outputs_of(name, output):
    """What the class `name` gives out, ours or theirs, in the same order."""
    if "Classification" in name:
        return [output.logits]
    if hasattr(output, "last_hidden_state"):
        return [output.last_hidden_state, output.pooler_output]
    return [output.hidden, output.pooled]


def compare(model, reference, pixels):
    """The map of each stage, and every output."""
    name = type(reference).__name__
    with torch.no_grad():
        expected = reference(to_torch(pixels), output_hidden_states=True, output_hidden_states_before_downsampling=True)
    output = run(model, pixels, ("stages",))
    maps = expected.reshaped_hidden_states[1:]  # the first is that of the patches
    assert len(output.stages) == len(maps) == len(model.config.depths)
    for stage, (state, other) in enumerate(zip(output.stages, maps, strict=True)):
        assert_close(state, other.permute(0, 2, 3, 1), message=f"stage {stage}")
    assert tuple(state.shape[1:3] for state in output.stages) == model.config.maps(pixels.shape[1:3])
    for value, other in zip(outputs_of(name, output), outputs_of(name, expected), strict=True):
        assert value.dtype == jnp.float32
        assert_close(value, other)


def loss_of(output, weights):
    """A number that all outputs have a part in, each element with a weight of its own."""
    return sum((value * weight).sum() for value, weight in zip(output, weights, strict=True))


@pytest.mark.parametrize("name", CLASSES)
def test_outputs_and_gradients(name, tmp_path):
    pixels = draw(23, 18)
    reference = make(name)
    reference.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    assert (loaded.architecture, loaded.new, loaded.unused, loaded.resized) == (name, (), (), ())
    compare(loaded.model, reference, pixels)

    reference = make(name).double()  # PyTorch's own gradients in float32 are no reference at 1e-5
    theirs = outputs_of(name, reference(to_torch(pixels).double()))
    weights = [np.random.default_rng(1).normal(size=value.shape).astype(np.float32) for value in theirs]
    loss_of(theirs, [torch.tensor(weight).double() for weight in weights]).backward()
    expected = {as_in_files(key): value.grad.numpy() for key, value in reference.named_parameters()}
    gradients = jax.jit(jax.grad(lambda model, x: loss_of(outputs_of(name, model(x)), weights)))(loaded.model, pixels)
    family, architecture = pretrained._layout(loaded.model)
    sizes, read = export(family, architecture, gradients)
    assert set(sizes) == set(expected)
    for key in sizes:
        # The key's bias has no effect on the softmax: its gradient is rounding, to be measured by its kernel's.
        scale = np.abs(expected[re.sub(r"key\.bias", "key.weight", key)]).max()
        assert_close(read(key), expected[key], scale=scale, message=key)


def as_in_files(name):
    """The name in files of a parameter of transformers 5."""
    for new, old in (
        (".attention.relative_position_bias.", ".attention.self."),
        *((f".attention.{x[0]}_proj.", f".attention.self.{x}.") for x in ("query", "key", "value")),
        (".attention.o_proj.", ".attention.output.dense."),
        (".mlp.fc1.", ".intermediate.dense."),
        (".mlp.fc2.", ".output.dense."),
    ):
        name = name.replace(new, old)
    return name


@pytest.mark.parametrize(
    "size",
    [
        (24, 24),  # windows divide the first map, of 12 x 12 places
        (22, 30),  # 11 x 15: padded windows, a padded merging
        (13, 29),  # patches do not divide them
        (12, 12),  # the second map is one window: nothing is shifted there
        (12, 40),  # one window high, and several wide
        (6, 11),  # the first map, too, and the second is smaller than a window in one direction
    ],
)
def test_images_of_any_size(size, tmp_path):
    reference = make("SwinForImageClassification")
    reference.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    if size == (6, 11):  # transformers fails where a map is smaller than the window; the first stage is left
        with torch.no_grad(), pytest.raises(RuntimeError):
            reference(to_torch(draw(*size)))
        assert np.isfinite(run(model, draw(*size)).logits).all()
        return
    compare(model, reference, draw(*size))


def test_other_sizes(tmp_path):
    """Three stages, even windows, patches that are not square, grey images, another activation."""
    sizes = dict(depths=[2, 1, 2], num_heads=[1, 2, 4], window_size=4, patch_size=[2, 3], num_channels=1)
    reference = make("SwinModel", **sizes, image_size=[36, 57], hidden_act="gelu_new", embed_dim=8)
    reference.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert model.config.image_size == (36, 57) and model.config.maps() == ((18, 19), (9, 10), (5, 5))
    compare(model, reference, draw(36, 57, channels=1))


@pytest.mark.parametrize(("old", "new"), [(3, 5), (4, 3)])
def test_tables_for_another_window(old, new, tmp_path):
    """Resized by PyTorch itself, as the original does it, the model computes what ours does after its own resizing."""
    reference = make("SwinForImageClassification", window_size=old, seed=3)
    reference.save_pretrained(tmp_path)
    state, resized = reference.state_dict(), []
    for key, table in state.items():
        if "relative_position_bias_table" in key:
            side = 2 * old - 1
            grid = table.T.reshape(1, -1, side, side)
            grid = torch.nn.functional.interpolate(grid, size=(2 * new - 1,) * 2, mode="bicubic", align_corners=False)
            state[key] = grid.reshape(table.shape[1], -1).T
            resized.append(key)
    other = make("SwinForImageClassification", window_size=new)
    other.load_state_dict(state)
    loaded = load_pretrained(tmp_path, changes={"window": new, "image_size": 40})
    assert loaded.model.config.window == new
    # One table a place in the cycle of each stage: two, and three that do not repeat.
    assert len(loaded.resized) == len(resized) == 5
    assert all(path.endswith("relative.embedding") for path in loaded.resized)
    compare(loaded.model, other, draw(38, 40))
