"""Checkpoints of Swin as people have them: buffers of older files, other heads, sizes, settings; without PyTorch."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from transformers_jax.data import ImageProcessor
from transformers_jax.models import ImageClassifier, Swin, SwinConfig
from transformers_jax.nn import resize_positions
from transformers_jax.pretrained import from_pretrained, load_image_processor, load_pretrained, save_pretrained
from transformers_jax.pretrained.engine import named_leaves

SIZES = dict(image_size=(12, 18), patch_size=2, dims=(12, 24), depths=(2, 3), heads=(2, 3), window=3, mlp_ratio=1.5)
SIZES |= dict(image_mean=(0.485, 0.456, 0.406), image_std=(0.229, 0.224, 0.225))
TABLE = "encoder.layers.{}.blocks.{}.attention.self.relative_position_bias_table"


def build(head=ImageClassifier, **changes):
    """A model with every parameter random."""
    config = SwinConfig(**SIZES | ({"labels": ("a", "b", "c")} if head else {}) | changes)

    def make():
        model = Swin(config, rngs=nnx.Rngs(0))
        return model if head is None else head(model, rngs=nnx.Rngs(1))

    abstract, rng = jax.eval_shape(make), np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def assert_same(model, other):
    ours, theirs = named_leaves(model), named_leaves(other)
    assert set(ours) == set(theirs)
    for path, leaf in theirs.items():
        np.testing.assert_array_equal(ours[path], leaf, err_msg=path)


def bits(path):
    tensors = load_file(path / "model.safetensors")
    return {name: (x.dtype, x.shape, np.ascontiguousarray(x).tobytes()) for name, x in tensors.items()}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", [None, ImageClassifier])
def test_round_trip_is_bit_identical(head, kind, written, tmp_path):
    def typed(tensors):
        return {name: x.astype(jnp.dtype(kind)) for name, x in tensors.items()}

    first = written(build(head, stochastic_depth=0.3), typed)
    loaded = load_pretrained(first)
    assert loaded.architecture == ("SwinForImageClassification" if head else "SwinModel")
    assert (loaded.new, loaded.unused, loaded.resized) == ((), (), ())
    assert loaded.model.config == build(head, dtype=kind, param_dtype=kind, stochastic_depth=0.3).config
    save_pretrained(loaded.model, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(first)
    fields, again = (json.loads((path / "config.json").read_text()) for path in (first, tmp_path / "out"))
    assert fields | {"dtype": kind} == again
    assert (again["embed_dim"], again["window_size"], again["hidden_size"]) == (12, 3, 24)


def test_names_and_shapes_are_those_of_transformers(written):
    shapes = {name: x.shape for name, x in load_file(written(build(None)) / "model.safetensors").items()}
    assert shapes["embeddings.patch_embeddings.projection.weight"] == (12, 3, 2, 2)
    assert shapes["encoder.layers.0.downsample.reduction.weight"] == (24, 48)
    assert shapes["encoder.layers.1.blocks.2.intermediate.dense.weight"] == (36, 24)
    assert {name for name in shapes if name.endswith("table")} == {
        TABLE.format(stage, layer) for stage, layer in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))
    }
    assert shapes[TABLE.format(1, 2)] == (25, 3)


def test_buffers_of_older_files_are_rebuilt_not_read(written):
    """What they hold is of no account, as in the files that have none."""

    def older(tensors):
        start = "swin.encoder.layers.0.blocks.1."
        return tensors | {
            start + "attention.self.relative_position_index": np.full((9, 9), 7, np.int64),
            start + "attn_mask": np.zeros((4, 9, 9), np.float32),
        }

    model = build()
    loaded = load_pretrained(written(model, older, path_norm=True))
    assert (loaded.new, loaded.unused) == ((), ())
    assert_same(loaded.model, model)


def test_tables_are_resized_for_another_window_and_that_is_told(written, caplog):
    model = build()
    loaded = load_pretrained(
        written(model), changes={"window": 5, "image_size": 40, "labels": ("x", "y")}, new_head=True
    )
    assert loaded.resized == tuple(
        f"backbone.stages.{stage}.stack.layers.{place}.relative.embedding"
        for stage, place in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))
    )
    assert "resized: backbone.stages.0.stack.layers.0.relative.embedding (1, 25, 2) to (1, 81, 2)" in caplog.text
    old, new = (named_leaves(one)[loaded.resized[3]][0] for one in (model, loaded.model))
    np.testing.assert_allclose(new, resize_positions(old, (5, 5), (9, 9), how="bicubic"), atol=1e-6)
    np.testing.assert_allclose(new[40], old[12], rtol=1e-6)
    same = load_pretrained(written(model), changes={"window": (3, 3)})
    assert same.resized == () and named_leaves(same.model)[loaded.resized[3]].shape == (1, 25, 3)


def test_bare_file_into_a_classifier_and_back(written):
    model = build(None)
    loaded = load_pretrained(
        written(model), architecture=ImageClassifier, changes={"labels": ("x", "y")}, new_head=True
    )
    assert loaded.new == ("head.bias", "head.kernel") and loaded.unused == ()
    assert_same(loaded.model.backbone, model)
    classifier = build()
    loaded = load_pretrained(written(classifier), architecture=Swin)
    assert_same(loaded.model, classifier.backbone)
    assert loaded.unused == ("classifier.bias", "classifier.weight")


def test_pretraining_by_masked_patches_is_read_as_the_bare_model(written):
    def masked(tensors):
        return {"swin." + name: value for name, value in tensors.items()} | {
            "swin.embeddings.mask_token": np.ones((1, 1, 12), np.float32),
            "decoder.0.weight": np.ones((48, 24, 1, 1), np.float32),
            "decoder.0.bias": np.ones(48, np.float32),
        }

    model = build(None)
    directory = written(model, masked, architectures=["SwinForMaskedImageModeling"], encoder_stride=4)
    loaded = load_pretrained(directory, architecture="SwinModel")
    assert loaded.unused == ("decoder.0.bias", "decoder.0.weight", "swin.embeddings.mask_token")
    assert_same(loaded.model, model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "swinv2"}, "has model_type 'swinv2', which is not supported; there are .*swin"),
        ({"qkv_bias": False}, r"config\.json: config\.json sets qkv_bias to False; only True is supported"),
        ({"use_absolute_embeddings": True}, "sets use_absolute_embeddings to True; only False is supported"),
        ({"pretrained_window_sizes": [8, 8]}, r"sets pretrained_window_sizes=\[8, 8\], unknown for swin"),
        ({"num_heads": [2, 5]}, r"in stage 1 .* heads=\(2, 5\), and 5 does not divide 24"),
        ({"window_size": 0}, "window=0 must be a whole number of places"),
    ],
)
def test_what_is_not_supported_is_named(fields, message, written):
    with pytest.raises(ValueError, match=message):
        from_pretrained(written(build(), **fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": (12, 18)}, r"has dims=\(12, 24\), not \(12, 18\)"),
        ({"window": (3, 2)}, r"has window=3, not \(3, 2\)"),
    ],
)
def test_what_transformers_cannot_build_is_not_written(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_pretrained(build(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pictures_are_prepared_as_for_the_published_checkpoints(written):
    processor = load_image_processor(written(build()))
    assert processor == ImageProcessor.default_of("swin", (12, 18))
    assert (processor.resampling, processor.crop, processor.mean) == ("bicubic", False, (0.485, 0.456, 0.406))
