"""The engine with a family of its own that needs every kind of rule, and the files that it reads and writes."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from functools import partial

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from transformers_jax import pretrained
from transformers_jax.nn import LayerNorm, Linear, Stack
from transformers_jax.pretrained import files as files_module
from transformers_jax.pretrained import find_directory, from_pretrained, load_pretrained, save_pretrained
from transformers_jax.pretrained.engine import named_leaves
from transformers_jax.pretrained.rules import Architecture, Family, Rule, expand

# A family with all that the zoo's families need: patches as a convolution, a norm with old names, a fused tensor split
# along its first axis and transposed, a stack whose layers alternate in shape, and a head of several tensors.


@dataclasses.dataclass(frozen=True)
class QuiltConfig:
    dim: int = 6
    depth: int = 4
    classes: int = 3
    pooler: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"


class Block(nnx.Module):
    def __init__(self, dim, width, *, rngs):
        self.wide = Linear(dim, width, rngs=rngs)
        self.query, self.key = Linear(dim, 5, rngs=rngs), Linear(dim, 2, rngs=rngs)


class Quilt(nnx.Module):
    def __init__(self, config, *, rngs):
        self.config = config
        self.patches = Linear(2 * 3 * 4, config.dim, rngs=rngs)
        self.norm = LayerNorm(config.dim, rngs=rngs)
        makers = [partial(Block, config.dim, 7), partial(Block, config.dim, 7)]
        self.stack = Stack(makers, config.depth, rngs=rngs)
        self.pooler = Linear(config.dim, config.dim, rngs=rngs) if config.pooler else nnx.data(None)


class Classifier(nnx.Module):
    def __init__(self, backbone, *, rngs):
        self.backbone = backbone
        self.head = Linear(backbone.config.dim, backbone.config.classes, rngs=rngs)

    @property
    def config(self):
        return self.backbone.config


def quilt_rules(config):
    layer = "stack.layers.{layer}."
    return [
        Rule("patch.projection.weight", "patches.kernel", axes=(2, 3, 1, 0), shape=(config.dim, 4, 2, 3)),
        Rule("patch.projection.bias", "patches.bias"),
        Rule("LayerNorm.weight", "norm.scale"),
        Rule("LayerNorm.bias", "norm.bias"),
        Rule("block.{layer}.qk.weight", (layer + "query.kernel", layer + "key.kernel"), axes=(1, 0), axis=0),
        Rule("block.{layer}.qk.bias", (layer + "query.bias", layer + "key.bias"), axis=0),
        # By place in the cycle, as where a checkpoint numbers pairs of layers.
        Rule("pair.{layer}.first.weight", "stack.layers.0.wide.kernel", axes=(1, 0)),
        Rule("pair.{layer}.first.bias", "stack.layers.0.wide.bias"),
        Rule("pair.{layer}.second.weight", "stack.layers.1.wide.kernel", axes=(1, 0)),
        Rule("pair.{layer}.second.bias", "stack.layers.1.wide.bias"),
        Rule("pooler.weight", "pooler.kernel", axes=(1, 0)),
        Rule("pooler.bias", "pooler.bias"),
    ]


def without_pooler(config):
    return dataclasses.replace(config, pooler=False)


QUILT = Family(
    model_type="quilt",
    prefix="quilt.",
    backbone=Quilt,
    rules=quilt_rules,
    architectures=(
        Architecture("QuiltModel", None, lambda config, rngs: Quilt(config, rngs=rngs)),
        Architecture(
            "QuiltClassifier",
            Classifier,
            lambda config, rngs: Classifier(Quilt(without_pooler(config), rngs=rngs), rngs=rngs),
            rules=(Rule("classifier.weight", "head.kernel", axes=(1, 0)), Rule("classifier.bias", "head.bias")),
        ),
    ),
    read_config=lambda fields: QuiltConfig(dim=fields.pop("dim", 6), depth=fields.pop("depth", 4)),
    write_config=lambda config: {"dim": config.dim, "depth": config.depth},
    ignored=(r"patch\.position_ids",),
    renamed=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)


@pytest.fixture
def quilt(monkeypatch, tmp_path):
    """A checkpoint of the family with a head, its tensors made here, and the family known to the package."""
    monkeypatch.setattr(pretrained, "FAMILIES", (*pretrained.FAMILIES, QUILT))
    rng = np.random.default_rng(0)
    shapes = {"quilt.patch.projection.weight": (6, 4, 2, 3), "quilt.patch.projection.bias": (6,)}
    shapes |= {"quilt.LayerNorm.weight": (6,), "quilt.LayerNorm.bias": (6,)}
    for i in range(4):
        shapes |= {f"quilt.block.{i}.qk.weight": (7, 6), f"quilt.block.{i}.qk.bias": (7,)}
    for i in range(2):
        for place in ("first", "second"):
            shapes |= {f"quilt.pair.{i}.{place}.weight": (7, 6), f"quilt.pair.{i}.{place}.bias": (7,)}
    shapes |= {"classifier.weight": (3, 6), "classifier.bias": (3,)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def write(tensors, architecture="QuiltClassifier"):
        directory = tmp_path / f"quilt-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"model_type": "quilt", "architectures": [architecture]}))
        save_file(tensors, directory / "model.safetensors")
        return directory

    return tensors, write


def test_every_kind_of_rule_puts_values_where_they_belong(quilt):
    tensors, write = quilt
    model = from_pretrained(write(tensors))
    backbone = model.backbone
    picture = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)  # one patch: height, width, channels
    convolved = np.einsum("hwc,dchw->d", picture, tensors["quilt.patch.projection.weight"])
    np.testing.assert_allclose(picture.reshape(-1) @ backbone.patches.kernel[...], convolved, rtol=1e-5)
    for layer in range(4):
        block, row = backbone.stack.layers[layer % 2], layer // 2
        fused = tensors[f"quilt.block.{layer}.qk.weight"]
        np.testing.assert_array_equal(block.query.kernel[row], fused[:5].T)
        np.testing.assert_array_equal(block.key.kernel[row], fused[5:].T)
        np.testing.assert_array_equal(block.key.bias[row], tensors[f"quilt.block.{layer}.qk.bias"][5:])
    np.testing.assert_array_equal(backbone.stack.layers[1].wide.kernel[0], tensors["quilt.pair.0.second.weight"].T)
    np.testing.assert_array_equal(backbone.stack.layers[0].wide.bias[1], tensors["quilt.pair.1.first.bias"])
    np.testing.assert_array_equal(model.head.kernel[...], tensors["classifier.weight"].T)


def test_every_kind_of_rule_is_undone(quilt, tmp_path):
    tensors, write = quilt
    save_pretrained(from_pretrained(write(tensors)), tmp_path / "out", max_shard_size=200)
    back = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        back |= load_file(path)
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_old_norm_names_and_only_those(quilt):
    tensors, write = quilt
    expected = named_leaves(from_pretrained(write(tensors)))
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): x for name, x in tensors.items()
    }
    assert old.keys() != tensors.keys()
    for path, leaf in named_leaves(from_pretrained(write(old))).items():
        np.testing.assert_array_equal(leaf, expected[path])
    with pytest.raises(ValueError, match=r"twice: quilt\.LayerNorm\.gamma and quilt\.LayerNorm\.weight"):
        from_pretrained(write(tensors | {"quilt.LayerNorm.gamma": tensors["quilt.LayerNorm.weight"]}))
    with pytest.raises(ValueError, match=r"unexpected: quilt\.layer_scale\.gamma"):
        from_pretrained(write(tensors | {"quilt.layer_scale.gamma": np.ones(6, np.float32)}))


def test_between_heads(quilt):
    tensors, write = quilt
    pooler = {"pooler.weight": np.ones((6, 6), np.float32), "pooler.bias": np.ones(6, np.float32)}
    base = {name.removeprefix("quilt."): x for name, x in tensors.items() if name.startswith("quilt.")} | pooler
    assert type(from_pretrained(write(base, "QuiltModel"))) is Quilt

    # From the bare model to a head: exactly the head is new, and what only the bare model has is left out.
    with pytest.raises(ValueError) as error:
        load_pretrained(write(base, "QuiltModel"), architecture="QuiltClassifier")
    assert "classifier.bias" in str(error.value) and "classifier.weight" in str(error.value)
    loaded = load_pretrained(write(base, "QuiltModel"), architecture="QuiltClassifier", new_head=True)
    assert loaded.new == ("head.bias", "head.kernel")
    assert loaded.unused == ("pooler.bias", "pooler.weight")
    again = load_pretrained(
        write(base, "QuiltModel"), architecture="QuiltClassifier", new_head=True, rngs=nnx.Rngs(5)
    )  # fmt: skip
    assert not np.array_equal(again.model.head.kernel[...], loaded.model.head.kernel[...])

    with pytest.raises(
        ValueError, match=r"unexpected: pooler\.bias \(6\); pass architecture='QuiltClassifier' to leave"
    ):
        load_pretrained(write(base | {n: tensors[n] for n in ("classifier.weight", "classifier.bias")}))

    # A part of the backbone is never new.
    del base["block.2.qk.bias"]
    with pytest.raises(ValueError, match=r"missing: block\.2\.qk\.bias \(7\)$"):
        load_pretrained(write(base, "QuiltModel"), architecture="QuiltClassifier", new_head=True)


def test_head_left_out_on_request(quilt):
    tensors, write = quilt
    pooler = {"quilt.pooler.weight": np.ones((6, 6), np.float32), "quilt.pooler.bias": np.ones(6, np.float32)}
    loaded = load_pretrained(write(tensors | pooler), architecture="QuiltModel")
    assert type(loaded.model) is Quilt and loaded.unused == ("classifier.bias", "classifier.weight")


def test_parameter_without_a_rule_is_an_error(quilt, monkeypatch, tmp_path):
    tensors, write = quilt
    model = from_pretrained(write(tensors))
    less = dataclasses.replace(QUILT, rules=lambda config: quilt_rules(config)[2:])
    monkeypatch.setattr(pretrained, "FAMILIES", (less,))
    with pytest.raises(ValueError, match=r"no rule: parameter backbone\.patches\.bias \(6\)"):
        from_pretrained(write(tensors))
    with pytest.raises(ValueError, match=r"no place for the parameters backbone\.patches\.bias, backbone\.patches"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stacks_of_one_model_expand_on_their_own():
    """Stages of different depth, as in Swin: one stack a stage, the rules made in a loop."""
    shapes = {"stages.0.layers.0.k": (1, 3), "stages.0.layers.1.k": (1, 3), "stages.1.layers.0.k": (3, 5)}
    shapes["stages.1.layers.1.k"] = (3, 5)
    rules = [Rule(f"stage.{s}.block.{{layer}}.k", f"stages.{s}.layers.{{layer}}.k") for s in range(2)]
    found = {
        tensor.name: (tensor.shape, tensor.parts[0].path, tensor.parts[0].index) for tensor in expand(rules, shapes)
    }
    assert len(found) == 2 + 6
    assert found["stage.0.block.1.k"] == ((3,), "stages.0.layers.1.k", 0)
    assert found["stage.1.block.5.k"] == ((5,), "stages.1.layers.1.k", 2)


# Files


def test_only_one_parameter_is_held_at_a_time(tiny, monkeypatch):
    """Whole parameters are put on their device before the next is read, and the model is never built with values."""
    log = []
    read, place = files_module.TensorFiles.read, pretrained.engine._place

    def reading(self, name, **where):
        log.append("read")
        return read(self, name, **where)

    def placing(*arguments):
        log.append("place")
        return place(*arguments)

    monkeypatch.setattr(files_module.TensorFiles, "read", reading)
    monkeypatch.setattr(pretrained.engine, "_place", placing)
    monkeypatch.setattr(jax.random, "normal", None)
    model = from_pretrained(tiny)
    assert log.count("place") == len(jax.tree.leaves(model))
    assert max(len(run) for run in "".join(word[0] for word in log).split("p")) == 3  # the layers of one stack


def test_nothing_of_pytorch_is_imported(tiny):
    code = f"import sys; from transformers_jax.pretrained import from_pretrained; from_pretrained({str(tiny)!r}); "
    code += "print(sorted({'torch', 'transformers', 'tensorflow', 'huggingface_hub'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_shards(tiny, tmp_path):
    save_pretrained(from_pretrained(tiny), tmp_path / "out", max_shard_size="10 KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    expected = load_file(tiny / "model.safetensors")
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("model-*-of-*.safetensors")]
    assert len(sizes) > 5 and max(sizes) < 12_000
    assert not (tmp_path / "out/model.safetensors").exists()
    back = from_pretrained(tmp_path / "out")
    for path, leaf in named_leaves(from_pretrained(tiny)).items():
        np.testing.assert_array_equal(leaf, named_leaves(back)[path])

    # A smaller checkpoint written over it leaves nothing of it behind.
    save_pretrained(back, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors"),
    ]
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o077 == (
        (tmp_path / "out/config.json").stat().st_mode & 0o077
    )


@pytest.mark.parametrize(
    ("size", "number"), [(7, 7), ("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 << 30), ("9b", 9), ("1kb", 1000)]
)
def test_sizes(size, number):
    assert files_module.parse_size(size) == number


@pytest.mark.parametrize("size", ["five", "5 GBB", "-3MB", 0, -1])
def test_sizes_that_are_none(size, tiny, tmp_path):
    with pytest.raises(ValueError, match=f"max_shard_size={size!r}"):
        save_pretrained(from_pretrained(tiny), tmp_path / "out", max_shard_size=size)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_and_damaged_files_are_named(tiny, tmp_path):
    save_pretrained(from_pretrained(tiny), tmp_path / "shards", max_shard_size="30KB")
    last = sorted((tmp_path / "shards").glob("model-*"))[-1]

    def damaged(change):
        directory = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tmp_path / "shards", directory)
        change(directory)
        return directory

    with pytest.raises(FileNotFoundError) as missing:
        from_pretrained(damaged(lambda directory: (directory / last.name).unlink()))
    assert f"{last.name} is missing" in one_line(missing)
    for keep in (0, 5, 100, last.stat().st_size - 1):
        with pytest.raises(ValueError) as cut:
            from_pretrained(damaged(lambda directory, keep=keep: os.truncate(directory / last.name, keep)))
        assert last.name in one_line(cut) and "cut off or damaged" in one_line(cut)

    def move(directory):
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        index["weight_map"]["transformer.wte.weight"] = last.name
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ValueError) as moved:
        from_pretrained(damaged(move))
    assert "does not hold transformer.wte.weight" in one_line(moved)
    with pytest.raises(ValueError) as broken:
        from_pretrained(damaged(lambda directory: (directory / "config.json").write_text("{")))
    assert "config.json is not JSON" in one_line(broken)
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json in"):
        from_pretrained(damaged(lambda directory: (directory / "config.json").unlink()))


def test_no_weights(copied):
    (copied / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError) as error:
        from_pretrained(copied)
    assert "neither model.safetensors nor model.safetensors.index.json" in one_line(error)
    (copied / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(ValueError) as error:
        from_pretrained(copied)
    assert "convert it where PyTorch is installed: cd " in one_line(error)


def test_unknown_model_types_are_answered_with_the_known(altered):
    for model_type in ("llama", None):
        with pytest.raises(ValueError, match=f"model_type {model_type!r}, which is not supported; there are gpt2"):
            from_pretrained(altered(model_type=model_type))


def test_a_model_of_ones_own_has_no_layout(tmp_path):
    with pytest.raises(ValueError, match="no layout known here for Linear"):
        save_pretrained(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tmp_path / "out")


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("moment", ["weights", "tokenizer", "moving"])
def test_an_interrupted_save_never_looks_complete(tiny, tmp_path, monkeypatch, before, moment):
    model, directory = from_pretrained(tiny), tmp_path / "out"
    if before:
        save_pretrained(model, directory)
    other = jax.tree.map(jnp.ones_like, model)

    def fail(*_, **__):
        raise KeyboardInterrupt

    class Tokenizer:
        def save(self, directory):
            (directory / "tokenizer.json").write_text("{}")
            if moment == "tokenizer":
                fail()

    if moment == "weights":
        monkeypatch.setattr(files_module, "save_file", fail)
    if moment == "moving":
        monkeypatch.setattr(files_module.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(other, directory, processor=Tokenizer())
    monkeypatch.undo()
    assert not list(directory.glob(".saving-*"))
    if before and moment != "moving":
        for path, leaf in named_leaves(from_pretrained(directory)).items():
            np.testing.assert_array_equal(leaf, named_leaves(model)[path])
    else:
        with pytest.raises(FileNotFoundError, match=r"there is no config\.json"):
            from_pretrained(directory)


def test_saving_to_a_file_is_refused(tiny, tmp_path):
    (tmp_path / "file").write_text("precious")
    for target in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ValueError, match="is, or lies under, a file"):
            save_pretrained(from_pretrained(tiny), target)
    assert (tmp_path / "file").read_text() == "precious"


def test_other_files_in_the_directory_stay(tiny, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    save_pretrained(from_pretrained(tiny), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


# Names


def test_a_directory_comes_before_the_hub(tiny, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.chdir(tiny.parent)
    assert find_directory(tiny.name).samefile(tiny)
    with pytest.raises(FileNotFoundError, match="is a file; give the directory"):
        find_directory(tiny / "config.json")


@pytest.mark.parametrize("name", ["./runs/none", "/none/such", "a/b/c", "~/none", "runs\\none"])
def test_what_is_no_hub_name_is_not_looked_for_there(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(FileNotFoundError, match="there is no directory") as error:
        from_pretrained(name)
    one_line(error)


def test_hub_names_are_downloaded(tiny, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        assert "model.safetensors" in allow_patterns and not any("bin" in pattern for pattern in allow_patterns)
        return str(tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert from_pretrained("owner/model", revision="v1").config.dim == 24
    assert from_pretrained("gpt2").config.dim == 24
    assert asked == [("owner/model", "v1"), ("gpt2", None)]

    def refuse(name, **_):
        raise OSError("404 Client Error\nlong story")  # the base of huggingface_hub's errors

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=r"owner/model is neither a directory nor .* \(404 Client Error\)"):
        from_pretrained("owner/model")


def test_without_huggingface_hub_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"install the extra `hub`: pip install 'transformers-jax\[hub\]'"):
        from_pretrained("owner/model")
