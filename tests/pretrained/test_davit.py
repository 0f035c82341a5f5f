"""timm's files of DaViT in and out, and what config.json may say in them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from transformers_jax.data import ImageProcessor
from transformers_jax.models import DaViT, DaViTConfig, ImageClassifier
from transformers_jax.pretrained import from_pretrained, load_image_processor, load_pretrained, save_pretrained
from transformers_jax.pretrained.davit import write_config
from transformers_jax.pretrained.engine import named_leaves

GOLDENS = Path(__file__).parents[1] / "goldens/davit"


def bits(path):
    tensors = load_file(path / "model.safetensors")
    return {name: (x.dtype, x.shape, np.ascontiguousarray(x).tobytes()) for name, x in tensors.items()}


def config_of(path):
    return json.loads((path / "config.json").read_text())


def changed(tmp_path, name="tiny", *, tensors=None, **changes):
    """A copy of a golden checkpoint with a changed config.json, whose `model_args` are added to those there are."""
    tmp_path.mkdir(exist_ok=True)
    content = config_of(GOLDENS / name)
    content["model_args"] |= changes.pop("model_args", {})
    content["pretrained_cfg"] |= changes.pop("pretrained_cfg", {})
    held = load_file(GOLDENS / name / "model.safetensors")
    save_file(held if tensors is None else tensors(held), tmp_path / "model.safetensors")
    content = {key: value for key, value in (content | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("name", ["tiny", "florence"])
def test_what_is_read_is_written_bit_for_bit(name, tmp_path):
    model = from_pretrained(GOLDENS / name)
    assert isinstance(model, ImageClassifier) and isinstance(model.backbone, DaViT)
    save_pretrained(model, tmp_path)
    rename = {"florence": lambda key: key.replace(".spatial_block.", ".0.").replace(".channel_block.", ".1.")}
    theirs = {rename.get(name, str)(key): value for key, value in bits(GOLDENS / name).items()}
    assert bits(tmp_path) == theirs
    again = from_pretrained(tmp_path)
    assert again.config == model.config
    for path, leaf in named_leaves(model).items():
        np.testing.assert_array_equal(named_leaves(again)[path], leaf, err_msg=path)


def test_config_json_is_timms(tmp_path):
    model = from_pretrained(GOLDENS / "tiny")
    assert model.config == DaViTConfig(
        dims=(6, 8, 12, 16),
        heads=(2, 2, 3, 4),
        depths=(1, 2, 1, 1),
        labels=("n0", "n1", "n2", "n3", "n4"),
        image_mean=(0.485, 0.456, 0.406),
        image_std=(0.229, 0.224, 0.225),
    )
    save_pretrained(model, tmp_path)
    ours, theirs = config_of(tmp_path), config_of(GOLDENS / "tiny")
    for key in ("architecture", "num_classes", "global_pool", "label_names"):
        assert ours[key] == theirs[key]
    # what is not named is as the architecture has it, and its pooling always is
    assert ours["model_args"] | {"global_pool": "avg"} == {
        key: value for key, value in theirs["model_args"].items() if key in ours["model_args"] or key == "global_pool"
    }
    assert {"embed_dims", "num_heads", "depths", "in_chans", "num_classes"} <= set(ours["model_args"])
    for key in ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "num_classes"):
        assert ours["pretrained_cfg"][key] == theirs["pretrained_cfg"][key]


def test_florence_is_written_with_its_settings(tmp_path):
    model = from_pretrained(GOLDENS / "florence")
    assert (model.config.channel_scale, model.config.downsampling, model.config.window) == ("places", 3, 5)
    assert model.config.labels == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3", "LABEL_4")
    save_pretrained(model, tmp_path)
    arguments = config_of(tmp_path)["model_args"]
    assert (arguments["channel_attn_v2"], arguments["down_kernel_size"], arguments["window_size"]) == (True, 3, 5)
    assert "label_names" not in config_of(tmp_path)


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large", "huge", "giant"])
def test_published_sizes_need_no_arguments(size):
    fields = write_config(getattr(DaViTConfig, size)())
    assert fields == {
        "architecture": f"davit_{size}",
        "image_size": [224, 224],
        "num_channels": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def test_a_file_without_a_classifier_is_the_bare_model(tmp_path):
    directory = changed(
        tmp_path / "in",
        tensors=lambda held: {key: x for key, x in held.items() if "head.fc" not in key},
        num_classes=0,
        label_names=None,
    )
    model = from_pretrained(directory)
    assert isinstance(model, DaViT) and model.config.labels == ()
    save_pretrained(model, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(directory)
    assert config_of(tmp_path / "out")["num_classes"] == 0
    loaded = load_pretrained(
        directory, architecture=ImageClassifier, new_head=True, changes={"labels": ("a", "b", "c")}
    )
    assert loaded.new == ("head.bias", "head.kernel") and loaded.model.head.kernel.shape == (16, 3)
    bare = load_pretrained(GOLDENS / "tiny", architecture=DaViT)
    assert bare.unused == ("head.fc.bias", "head.fc.weight") and isinstance(bare.model, DaViT)


def test_another_image_size_changes_no_parameter():
    model = from_pretrained(GOLDENS / "tiny", changes={"image_size": (61, 90), "window": 5})
    assert (model.config.image_size, model.config.window) == ((61, 90), 5)
    for path, leaf in named_leaves(from_pretrained(GOLDENS / "tiny")).items():
        np.testing.assert_array_equal(named_leaves(model)[path], leaf, err_msg=path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architecture="vit_small_patch16_224"), "'vit_small_patch16_224' of timm is not supported; there are dav"),
        (dict(architecture="davit_enormous"), "architecture 'davit_enormous' of timm is not supported"),
        (dict(model_args={"cpe_act": True}), "sets cpe_act to True; only False"),
        (dict(model_args={"head_norm_first": True}), "sets head_norm_first to True; only False"),
        (dict(model_args={"attn_types": ["channel", "spatial"]}), "only ['spatial', 'channel'] is supported"),
        (dict(model_args={"fancy": 3}), "fancy=3"),
        (dict(model_args={"num_heads": [4, 2, 3, 4]}), "heads=(4, 2, 3, 4), and 4 does not divide 6"),
        (dict(pretrained_cfg={"input_size": 224}), "input_size to 224"),
        (dict(label_names=["one"]), "names 1 labels, but sets num_classes to 5"),
        (dict(pretrained_cfg=dict(mean=[0.5, 0.5])), "image_mean=(0.5, 0.5)"),
        (dict(model_args={"window_size": 0}), "window=0 must be a whole number"),
    ],
)
def test_what_we_cannot_follow_is_named(changes, message, tmp_path):
    with pytest.raises(ValueError) as error:
        from_pretrained(changed(tmp_path, **changes))
    assert message in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    def damage(held):
        held = dict(held, surplus=np.zeros(3, np.float32))
        held["stages.1.blocks.1.1.attn.qkv.weight"] = np.zeros((24, 7), np.float32)
        del held["stages.0.blocks.0.0.cpe1.proj.weight"]
        return held

    with pytest.raises(ValueError) as error:
        from_pretrained(changed(tmp_path, tensors=damage))
    for line in (
        "missing: stages.0.blocks.0.0.cpe1.proj.weight (6, 1, 3, 3)",
        "unexpected: surplus (3)",
        "wrong shape: stages.1.blocks.1.1.attn.qkv.weight is (24, 7) in the file, (24, 8) in the model",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize("changes", [dict(patch_size=2), dict(activation="relu")])
def test_models_that_timm_does_not_have_are_not_written(changes, tmp_path):
    model = DaViTConfig(dims=(4,), depths=(1,), heads=(2,), **changes)
    abstract = jax.eval_shape(lambda: model.build(rngs=nnx.Rngs(0)))
    built = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), abstract)
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"of timm has {name}=.*, not {value!r}"):
        save_pretrained(built, tmp_path)


def test_types_and_old_forms_are_read(tmp_path):
    def halved(held):
        return {key: x.astype(np.float16) for key, x in held.items()}

    model = from_pretrained(changed(tmp_path, tensors=halved))
    assert model.config.dtype == model.config.param_dtype == "float16"
    # Before timm 0.9 everything was in one place, and label names may be numbered.
    content = config_of(tmp_path)
    old = content["pretrained_cfg"] | {"architecture": "davit_tiny", "labels": ["a", "b", "c", "d", "e"]}
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="wrong shape"):  # such a file has no arguments: it is davit_tiny itself
        from_pretrained(tmp_path)
    numbered = {str(number): f"name {number}" for number in range(5)}
    assert from_pretrained(changed(tmp_path, label_names=numbered)).config.labels == tuple(numbered.values())


def test_pictures_are_prepared_as_the_file_says(tmp_path):
    processor = load_image_processor(GOLDENS / "tiny")
    assert processor == ImageProcessor(
        (224, 224),
        resize=235,  # 224 / 0.95, rounded down
        crop=True,
        resampling="bicubic",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    for resize in range(224, 300):
        timms = dict(crop_pct=224 / (resize + 0.5))
        assert load_image_processor(changed(tmp_path, pretrained_cfg=timms)).resize == resize
    squash = changed(tmp_path, pretrained_cfg=dict(input_size=[3, 60, 80], crop_mode="squash", crop_pct=1.0))
    wide = load_image_processor(squash)
    assert (wide.size, wide.resize, wide.crop) == ((60, 80), (60, 80), False)
    for own in (processor, wide):
        model = from_pretrained(GOLDENS / "tiny", changes={"image_size": own.size})
        save_pretrained(model, tmp_path / "with", processor=own)
        assert load_image_processor(tmp_path / "with") == own
        (tmp_path / "with/preprocessor_config.json").unlink()  # timm reads config.json alone
        assert load_image_processor(tmp_path / "with").resize == own.resize
    with pytest.raises(ValueError, match="crop_mode 'border'"):
        load_image_processor(changed(tmp_path, pretrained_cfg=dict(crop_mode="border")))
