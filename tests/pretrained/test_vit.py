"""Checkpoints of ViT and DeiT as people have them: prefixes or none, other heads, sizes, settings; without PyTorch."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from transformers_jax.models import ImageClassifier, SequenceClassifier, ViT, ViTConfig
from transformers_jax.nn import resize_positions
from transformers_jax.pretrained import from_pretrained, load_pretrained, save_pretrained
from transformers_jax.pretrained.engine import named_leaves

SIZES = dict(image_size=(6, 9), patch_size=3, dim=12, depth=2, heads=3, mlp_dim=20, norm_epsilon=1e-12)
IMAGENET = dict(image_mean=(0.485, 0.456, 0.406), image_std=(0.229, 0.224, 0.225))
KINDS = {
    "ViTModel": dict(pooler=True),
    "ViTForImageClassification": {},
    "DeiTModel": dict(distillation_token=True, pooler=True, **IMAGENET),
    "DeiTForImageClassification": dict(distillation_token=True, **IMAGENET),
    "DeiTForImageClassificationWithTeacher": dict(distillation_token=True, distillation_head=True, **IMAGENET),
}


def build(name="ViTForImageClassification", **changes):
    """A model of transformers' class `name` with every parameter random."""
    head = ImageClassifier if "Classification" in name else None
    labels = {"labels": ("a", "b", "c")} if head else {}
    config = ViTConfig(**SIZES | KINDS[name] | labels | changes)

    def make():
        model = ViT(config, rngs=nnx.Rngs(0))
        return model if head is None else head(model, rngs=nnx.Rngs(1))

    abstract, rng = jax.eval_shape(make), np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def assert_same(model, other, *, but=()):
    ours, theirs = named_leaves(model), named_leaves(other)
    assert set(ours) == set(theirs)
    for path, leaf in theirs.items():
        if path not in but:
            np.testing.assert_array_equal(ours[path], leaf, err_msg=path)


def bits(path):
    tensors = load_file(path / "model.safetensors")
    return {name: (x.dtype, x.shape, np.ascontiguousarray(x).tobytes()) for name, x in tensors.items()}


def masked_image_model(tensors):
    """What ViTForMaskedImageModeling's files hold beside the encoder: a mask token and a decoder."""
    del tensors["pooler.dense.weight"], tensors["pooler.dense.bias"]
    tensors = {"vit." + name: value for name, value in tensors.items()}
    tensors["vit.embeddings.mask_token"] = np.ones((1, 1, 12), np.float32)
    return tensors | {
        "decoder.0.weight": np.ones((27, 12, 1, 1), np.float32),
        "decoder.0.bias": np.ones(27, np.float32),
    }


# Round trips


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", KINDS)
def test_round_trip_is_bit_identical(name, kind, written, tmp_path):
    def typed(tensors):
        return {name: x.astype(jnp.dtype(kind)) for name, x in tensors.items()}

    first = written(build(name, patch_size=(2, 3)), typed)
    loaded = load_pretrained(first)
    assert (loaded.architecture, loaded.new, loaded.unused) == (name, (), ())
    expected = dict(dtype=kind, param_dtype=kind, patch_size=(2, 3))
    assert loaded.model.config == build(name, **expected).config
    save_pretrained(loaded.model, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(first)
    fields, again = (json.loads((path / "config.json").read_text()) for path in (first, tmp_path / "out"))
    assert fields | {"dtype": kind} == again
    assert (again["image_size"], again["patch_size"], again["architectures"]) == ([6, 9], [2, 3], [name])


def test_shapes_in_the_file_are_those_of_transformers(written):
    tensors = load_file(written(build("DeiTModel", patch_size=(2, 3))) / "model.safetensors")
    assert {name: x.shape for name, x in tensors.items() if name.startswith("embeddings.")} == {
        "embeddings.cls_token": (1, 1, 12),
        "embeddings.distillation_token": (1, 1, 12),
        "embeddings.position_embeddings": (1, 11, 12),
        "embeddings.patch_embeddings.projection.weight": (12, 3, 2, 3),
        "embeddings.patch_embeddings.projection.bias": (12,),
    }


def test_a_read_model_is_like_a_built_one(written):
    model = from_pretrained(written(build("DeiTForImageClassificationWithTeacher")))
    built = ImageClassifier(ViT(model.config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    assert jax.tree.structure(model) == jax.tree.structure(built)
    assert [jax.typeof(x) for x in jax.tree.leaves(model)] == [jax.typeof(x) for x in jax.tree.leaves(built)]


def test_the_numbers_that_transformers_gives_a_missing_field(written):
    names = ("hidden_act", "layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob", "qkv_bias")
    names += ("initializer_range", "num_channels", "pooler_act")
    model = from_pretrained(written(build(), **dict.fromkeys(names, ...)))
    assert model.config == build().config
    assert (model.config.norm_epsilon, model.config.dropout, model.config.attention_dropout) == (1e-12, 0.0, 0.0)


# What people have


@pytest.mark.parametrize("name", ["ViTModel", "DeiTModel"])
@pytest.mark.parametrize("prefix", [True, False])
def test_bare_file_into_a_classifier(name, prefix, written):
    model = build(name)
    family = name.removesuffix("Model").lower()
    directory = written(model, lambda x: {f"{family}.{n}": v for n, v in x.items()} if prefix else x)
    changes = {"labels": ("x", "y")}
    with pytest.raises(ValueError, match=r"missing: classifier\.bias \(2\); pass new_head=True to start it afresh"):
        from_pretrained(directory, architecture=ImageClassifier, changes=changes)
    loaded = load_pretrained(directory, architecture=ImageClassifier, changes=changes, new_head=True)
    assert loaded.architecture == name.replace("Model", "ForImageClassification")
    assert loaded.new == ("head.bias", "head.kernel") and loaded.model.config.labels == ("x", "y")
    start = f"{family}." if prefix else ""
    assert loaded.unused == (f"{start}pooler.dense.bias", f"{start}pooler.dense.weight")
    np.testing.assert_array_equal(loaded.model.head.kernel[...], 0)
    kept = named_leaves(model)
    for path, leaf in named_leaves(loaded.model.backbone).items():
        np.testing.assert_array_equal(leaf, kept[path], err_msg=path)
    if name == "DeiTModel":
        teacher = load_pretrained(
            directory, architecture=ImageClassifier, changes=changes | {"distillation_head": True}, new_head=True
        )
        assert teacher.architecture == "DeiTForImageClassificationWithTeacher"
        assert teacher.new == ("distillation_head.bias", "distillation_head.kernel", "head.bias", "head.kernel")


@pytest.mark.parametrize("name", [name for name in KINDS if "Classification" in name])
def test_classifier_into_a_bare_model_and_with_new_labels(name, written):
    model = build(name)
    directory = written(model)
    loaded = load_pretrained(directory, architecture=ViT)
    assert_same(loaded.model, model.backbone)
    assert loaded.model.config.labels == () and loaded.model.pooler is None
    assert loaded.new == () and all("classifier" in tensor for tensor in loaded.unused) and loaded.unused
    with pytest.raises(
        ValueError, match=r"wrong shape: (cls_)?classifier\.bias is \(3\) in the file, \(4\) in the model"
    ):
        from_pretrained(directory, changes={"labels": tuple("wxyz")})
    fresh = load_pretrained(directory, changes={"labels": tuple("wxyz")}, new_head=True)
    assert fresh.new and all("head" in path for path in fresh.new)
    assert_same(fresh.model.backbone, model.backbone)
    assert load_pretrained(directory, new_head=True).new == ()  # what the file holds stays


def test_one_head_of_deit_into_the_other(written):
    teacher = build("DeiTForImageClassificationWithTeacher")
    directory = written(teacher)
    assert load_pretrained(directory, architecture=ImageClassifier).architecture.endswith("WithTeacher")
    loaded = load_pretrained(directory, architecture="DeiTForImageClassification", new_head=True)
    assert loaded.new == ("head.bias", "head.kernel") and loaded.model.distillation_head is None
    assert len(loaded.unused) == 4
    assert_same(loaded.model.backbone, teacher.backbone)


def test_masked_image_modeling_is_read_as_the_bare_model(written):
    model = build("ViTModel")
    directory = written(model, masked_image_model, architectures=["ViTForMaskedImageModeling"])
    with pytest.raises(
        ValueError, match="ViTForMaskedImageModeling is not supported for vit; there are ViTModel, ViTFor"
    ):
        from_pretrained(directory)
    for architecture in ("ViTModel", ViT):
        loaded = load_pretrained(directory, architecture=architecture)
        assert loaded.new == () and loaded.model.pooler is None
        assert loaded.unused == ("decoder.0.bias", "decoder.0.weight", "vit.embeddings.mask_token")
        ours, kept = named_leaves(loaded.model), named_leaves(model)
        assert all(np.array_equal(ours[path], kept[path]) for path in ours)
        assert set(kept) - set(ours) == {"pooler.bias", "pooler.kernel"}
    loaded = load_pretrained(directory, architecture=ImageClassifier, new_head=True)
    assert loaded.new == ("head.bias", "head.kernel")


def test_a_pooler_decides_what_a_bare_model_is(written):
    assert from_pretrained(written(build("ViTModel"))).pooler is not None
    assert from_pretrained(written(build("ViTModel", pooler=False))).pooler is None


def test_config_without_architectures(written):
    for name in KINDS:
        assert load_pretrained(written(build(name), architectures=...)).architecture == name


def test_sizes_as_numbers_or_lists(written):
    model = build(image_size=9)
    for size in (9, [9, 9]):
        config = from_pretrained(written(model, image_size=size, patch_size=[3, 3])).config
        assert (config.image_size, config.patch_size) == (9, 3)
    with pytest.raises(ValueError, match=r"config\.json: image_size=\(6, 10\), patch_size=3: .* cannot be cut"):
        from_pretrained(written(build(), image_size=[6, 10]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("qkv_bias", False),
        ("pooler_act", "relu"),
        ("pooler_output_size", 24),
        ("hidden_act", "mish"),
        ("head_dim", 8),
        ("use_mask_token", True),
    ],
)
def test_settings_that_are_not_supported_are_named(written, field, value):
    with pytest.raises(ValueError, match=rf"config\.json.*{field}"):
        from_pretrained(written(build("ViTModel"), **{field: value}))


def test_settings_without_effect_are_accepted(written):
    model = build("ViTModel")
    assert_same(from_pretrained(written(model, encoder_stride=16, pooler_output_size=12)), model)
    assert_same(from_pretrained(written(model, pooler_output_size=None)), model)


def test_nothing_may_be_missing_or_too_much(written):
    def change(tensors):
        del tensors["vit.encoder.layer.1.attention.attention.key.weight"]
        del tensors["vit.embeddings.cls_token"]
        return tensors | {"vit.layer_scale": np.ones(12, np.float32)}

    for new_head in (False, True):
        with pytest.raises(ValueError) as error:
            from_pretrained(written(build(), change), new_head=new_head)
        assert str(error.value).splitlines()[1:] == [
            "  missing: vit.embeddings.cls_token (1, 1, 12)",
            "  missing: vit.encoder.layer.1.attention.attention.key.weight (12, 12)",
            "  unexpected: vit.layer_scale (12)",
        ]


def test_what_cannot_be_changed_when_reading(written):
    directory = written(build())
    with pytest.raises(
        ValueError, match=r"wrong shape: vit\.embeddings\.patch_embeddings\.projection\.weight is \(12, 3"
    ):
        from_pretrained(directory, changes={"channels": 1})
    with pytest.raises(ValueError, match="there is no SequenceClassifier for vit; there are ViT, ImageClassifier"):
        from_pretrained(directory, architecture=SequenceClassifier)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ViTForImageClassification", {"pooling": "mean"}, "has pooling='class_token', not 'mean'"),
        ("ViTModel", {"positions": "sinusoidal"}, "ViTModel of transformers has positions='learned', not 'sinusoidal'"),
        ("DeiTModel", {"position_resampling": "corners"}, "has position_resampling='bicubic', not 'corners'"),
        ("ViTForImageClassification", {"class_token": False, "pooling": "mean"}, "no layout known here for ImageCl"),
    ],
)
def test_what_transformers_would_compute_otherwise_is_not_written(name, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_pretrained(build(name, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_labels_and_what_they_mean(written):
    directory = written(build(problem_type="multi_label_classification"))
    fields = json.loads((directory / "config.json").read_text())
    assert fields["id2label"] == {"0": "a", "1": "b", "2": "c"} and fields["label2id"] == {"a": 0, "b": 1, "c": 2}
    config = from_pretrained(directory).config
    assert (config.labels, config.problem_type) == (("a", "b", "c"), "multi_label_classification")


def test_mean_and_deviation_are_the_familys(written):
    assert from_pretrained(written(build())).config.image_mean == (0.5,)
    deit = from_pretrained(written(build("DeiTForImageClassification"))).config
    assert (deit.image_mean, deit.image_std) == tuple(IMAGENET.values())
    grey = dict(channels=1, image_mean=(0.5,), image_std=(0.5,))
    assert from_pretrained(written(build("DeiTModel", **grey))).config.image_mean == (0.5,)


# Another size


@pytest.mark.parametrize("name", ["ViTModel", "DeiTForImageClassificationWithTeacher"])
def test_another_image_size_resizes_the_positions(name, written):
    model = build(name)
    loaded = load_pretrained(written(model), changes={"image_size": (12, 6)})
    assert loaded.new == loaded.unused == () and loaded.model.config.grid == (4, 2)
    backbone, old = (getattr(one, "backbone", one) for one in (loaded.model, model))
    table = resize_positions(old.positions.embedding[...], (2, 3), (4, 2), prefix=old.config.prefix, how="bicubic")
    np.testing.assert_array_equal(backbone.positions.embedding[...], table)
    changed = "positions.embedding" if backbone is loaded.model else "backbone.positions.embedding"
    assert_same(loaded.model, model, but=(changed,))
    same = load_pretrained(written(model), changes={"image_size": (6, 9)})
    assert_same(same.model, model)


def test_another_size_with_a_new_head_a_filter_a_type_and_devices(written):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def split(path, leaf):
        rows = leaf.shape == (8, 12) and path == "backbone.positions.embedding"  # 7 + 1 of the new size
        return NamedSharding(mesh, PartitionSpec("fsdp" if rows else None))

    model = build(class_token=True, image_size=(3, 3))
    changes = {"image_size": (3, 21), "labels": ("x", "y"), "position_resampling": "corners"}
    loaded = load_pretrained(
        written(model), changes=changes, new_head=True, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, shardings=split
    )
    assert loaded.new == ("head.bias", "head.kernel")
    table = loaded.model.backbone.positions.embedding[...]
    assert table.shape == (8, 12) and table.dtype == jnp.bfloat16
    assert table.addressable_shards[0].data.shape == (1, 12)
    old = model.backbone.positions.embedding[...].astype(jnp.bfloat16)
    np.testing.assert_array_equal(table, jnp.concatenate([old[:1], jnp.repeat(old[1:], 7, axis=0)]))


# A trained checkpoint


@jax.jit
def run(model, pixels):
    return model(pixels, capture=("hidden_states",))


def test_trained_on_mnist(shared_data):
    """The numbers stored with it. Its test images are not at hand, but four of them are there enlarged to 42 pixels,
    linearly, from which their pixels follow: whole numbers, which tells that they do."""
    directory = shared_data / "hf_trained/vit_mnist"
    golden = np.load(directory / "golden.npz")
    loaded = load_pretrained(directory)
    assert (loaded.architecture, loaded.new, loaded.unused) == ("ViTForImageClassification", (), ())
    model, large = loaded.model, golden["x42"].transpose(0, 2, 3, 1)
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == 139_018
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(run(model, large).logits, golden["logits_interp42"], rtol=1e-5, atol=1e-5)
        for changes in ({"image_size": 42}, {"image_size": (42, 42)}):  # resized once, with the same result
            resized = from_pretrained(directory, changes=changes)
            np.testing.assert_allclose(run(resized, large).logits, golden["logits_interp42"], rtol=1e-5, atol=1e-5)

        places = np.clip((np.arange(42) + 0.5) * 28 / 42 - 0.5, 0, 27)
        enlarge = np.maximum(1 - np.abs(places[:, None] - np.arange(28)), 0)
        back = np.linalg.pinv(enlarge)
        pixels = (back @ golden["x42"][:, 0] @ back.T * 0.5 + 0.5) * 255
        assert np.abs(pixels - pixels.round()).max() < 1e-3
        small = ((pixels.round() / 255 - 0.5) / 0.5)[..., None].astype(np.float32)
        output = run(model, small)
    np.testing.assert_allclose(output.logits, golden["logits"][:4], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output.logits, golden["test_logits"][:4], rtol=1e-5, atol=1e-5)
    for layer, state in enumerate(output.hidden_states):
        np.testing.assert_allclose(state, golden["hidden"][layer][:4], rtol=1e-5, atol=1e-5, err_msg=str(layer))
    last = model.backbone.norm(jnp.asarray(golden["hidden"][4][:4]))
    np.testing.assert_allclose(output.hidden, last, rtol=1e-5, atol=1e-5)


def test_trained_on_mnist_knows_what_it_was_trained_on(shared_data):
    """On its 8,000 training images, which are at hand, it must do better than the 96.25 % of its test images."""
    folder = shared_data / "mnist"
    images = np.frombuffer(gzip.decompress((folder / "images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / "labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    pixels = ((images.reshape(-1, 28, 28, 1)[:2000] / 255 - 0.5) / 0.5).astype(np.float32)
    predicted = np.asarray(run(from_pretrained(shared_data / "hf_trained/vit_mnist"), pixels).logits).argmax(-1)
    assert (predicted == labels[:2000]).mean() > 0.9625
