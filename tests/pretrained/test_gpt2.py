"""GPT-2 checkpoints give the numbers that PyTorch gives, go out as they came in, and are read strictly."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from transformers_jax.models import GPT, GPTConfig, LanguageModel
from transformers_jax.pretrained import from_pretrained, load_pretrained, save_pretrained
from transformers_jax.pretrained.engine import export, named_leaves
from transformers_jax.pretrained.gpt2 import GPT2, read_config, write_config

CLOSE = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@jax.jit
def forward(model, ids, mask=None):
    return model(ids, mask, capture=("hidden_states", "attention_weights"))


def greedy(model, prompt, steps):
    """The prompt and `steps` tokens more, by a whole forward pass for each; the row is long enough from the start."""
    step = jax.jit(lambda model, ids, last: model(ids).logits[:, last].argmax(-1))
    ids = jnp.pad(jnp.asarray(prompt, jnp.int32), ((0, 0), (0, steps)))
    for place in range(prompt.shape[1], ids.shape[1]):
        ids = ids.at[:, place].set(step(model, ids, place - 1))
    return np.asarray(ids)


def lm_loss(model, ids):
    log_probs = jax.nn.log_softmax(model(ids).logits[:, :-1])
    return -jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1).mean()


def bits(tensors):
    return {name: (x.dtype, x.shape, np.ascontiguousarray(x).tobytes()) for name, x in tensors.items()}


# Numbers


def test_hidden_states_attention_and_logits(tiny, outputs):
    output = forward(from_pretrained(tiny), outputs["ids"])
    states = np.concatenate([output.hidden_states, output.hidden[None]])
    np.testing.assert_allclose(states, outputs["hidden_states"], **CLOSE)
    np.testing.assert_allclose(output.attention_weights, outputs["attention_weights"], **CLOSE)
    np.testing.assert_allclose(output.logits, outputs["logits"], **CLOSE)


def test_left_padding(tiny, outputs):
    logits = forward(from_pretrained(tiny), outputs["ids"], outputs["mask"]).logits
    real = outputs["mask"] == 1
    np.testing.assert_allclose(logits[real], outputs["padded_logits"][real], **CLOSE)


def test_greedy_tokens(tiny, outputs):
    np.testing.assert_array_equal(greedy(from_pretrained(tiny), outputs["ids"][:1, :5], 64), outputs["greedy"])


def test_gradients(tiny, outputs):
    model = from_pretrained(tiny)
    loss, gradients = jax.jit(jax.value_and_grad(lm_loss))(model, outputs["ids"])
    np.testing.assert_allclose(loss, outputs["loss"], rtol=1e-5)
    sizes, read = export(GPT2, GPT2.architecture("GPT2LMHeadModel"), gradients)
    assert {f"gradient/{name}" for name in sizes} == {name for name in outputs if name.startswith("gradient/")}
    for name in sizes:
        expected = outputs[f"gradient/{name}"]
        # The key's bias has no effect on the softmax: its gradient is rounding, so errors are measured by the tensor.
        np.testing.assert_allclose(read(name), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(), err_msg=name)


def test_trained_gpt2(shared_data):
    golden = np.load(shared_data / "hf_trained/gpt2_shakespeare/golden.npz")
    model = from_pretrained(shared_data / "hf_trained/gpt2_shakespeare")
    output = forward(model, jnp.asarray(golden["ids"]))
    np.testing.assert_allclose(output.logits[0], golden["logits_b0"], **CLOSE)
    np.testing.assert_allclose(output.logits[:, -1], golden["logits_last"], **CLOSE)
    np.testing.assert_allclose(output.hidden_states[1][0], golden["hidden1_b0"], **CLOSE)
    np.testing.assert_allclose(output.hidden[0], golden["hidden_last_b0"], **CLOSE)
    padded = forward(model, jnp.asarray(golden["leftpad_ids"]), jnp.asarray(golden["leftpad_mask"])).logits[:, -1]
    np.testing.assert_array_equal(padded.argmax(-1), golden["leftpad_greedy"][:, golden["leftpad_ids"].shape[1]])


def test_published_model_layer_by_layer(shared_data):
    folder = shared_data / "gpt_nano_sort"
    model = from_pretrained(folder / "hf_format")
    partial = np.load(folder / "partials_f32.npz")
    output = forward(model, jnp.asarray(partial["idx"], jnp.int32))
    states = [*output.hidden_states, output.hidden]
    for name, state in zip(("x", "block0", "block1", "ln_f"), states, strict=True):
        np.testing.assert_allclose(state, partial[name], **CLOSE, err_msg=name)
    np.testing.assert_allclose(output.attention_weights[0], partial["attSm"], **CLOSE)
    np.testing.assert_allclose(output.logits, partial["lm_head"], **CLOSE)
    golden = np.load(folder / "golden_hf.npz")
    ids = np.concatenate([golden["inp"], golden["out"][:, :-1]], axis=1)
    logits = forward(model, jnp.asarray(ids)).logits
    np.testing.assert_allclose(logits[:64], golden["logits_first64"], **CLOSE)
    np.testing.assert_array_equal(logits[:, 5:].argmax(-1), golden["out"])


# Types and devices


def test_a_read_model_is_like_a_built_one(tiny):
    """So that a compiled step, an optimizer's state or a checkpoint of one fits the other."""
    model = from_pretrained(tiny)
    built = LanguageModel(GPT(model.config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    assert jax.tree.structure(model) == jax.tree.structure(built)
    assert [jax.typeof(leaf) for leaf in jax.tree.leaves(model)] == [
        jax.typeof(leaf) for leaf in jax.tree.leaves(built)
    ]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_round_trip_is_bit_identical(altered, tmp_path, kind):
    source = altered(lambda tensors: {name: x.astype(jnp.dtype(kind)) for name, x in tensors.items()})
    first = from_pretrained(source)
    assert first.config.param_dtype == first.config.dtype == kind
    save_pretrained(first, tmp_path / "out")
    second = from_pretrained(tmp_path / "out")
    assert first.config == second.config
    assert bits(named_leaves(first)) == bits(named_leaves(second))
    assert bits(load_file(source / "model.safetensors")) == bits(load_file(tmp_path / "out/model.safetensors"))


def test_types_on_request(tiny):
    exact = named_leaves(from_pretrained(tiny))
    half = from_pretrained(tiny, dtype="bfloat16")
    assert (half.config.dtype, half.config.param_dtype) == ("bfloat16", "bfloat16")
    for path, leaf in named_leaves(half).items():
        np.testing.assert_array_equal(leaf, np.asarray(exact[path]).astype(jnp.bfloat16), err_msg=path)
    mixed = from_pretrained(tiny, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert bits(named_leaves(mixed)) == bits(exact)
    assert mixed(jnp.ones((1, 3), jnp.int32)).hidden.dtype == jnp.bfloat16
    assert from_pretrained(tiny, param_dtype="bfloat16")(jnp.ones((1, 3), jnp.int32)).hidden.dtype == jnp.float32


def test_parameters_land_on_their_devices(tiny, outputs):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def sharding(path, leaf):
        axis = None if leaf.shape[-1] % 4 else "tensor"
        return NamedSharding(mesh, PartitionSpec(*[None] * (len(leaf.shape) - 1), axis))

    plain, sharded = from_pretrained(tiny), from_pretrained(tiny, shardings=sharding)
    assert bits(named_leaves(plain)) == bits(named_leaves(sharded))
    for path, leaf in named_leaves(sharded).items():
        assert leaf.sharding == sharding(path, leaf), path
    query = sharded.backbone.stack.layers[0].attention.query.kernel[...]
    assert {shard.data.shape for shard in query.addressable_shards} == {(3, 24, 6)}
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x).logits)(sharded, outputs["ids"]), outputs["logits"], **CLOSE)

    by_path = {path: leaf.sharding for path, leaf in named_leaves(sharded).items()}
    by_tree = jax.tree.map(lambda leaf: leaf.sharding, sharded)
    for given in (by_path, by_tree, NamedSharding(mesh, PartitionSpec())):
        assert bits(named_leaves(from_pretrained(tiny, shardings=given))) == bits(named_leaves(plain))
    with pytest.raises(ValueError, match=r"backbone\.embedding\.embedding \(47, 24\) cannot be laid out so: "):
        from_pretrained(tiny, shardings=NamedSharding(mesh, PartitionSpec("data")))
    by_path.pop("backbone.norm.scale")
    with pytest.raises(ValueError, match=r"differ in backbone\.norm\.scale"):
        from_pretrained(tiny, shardings=by_path)


def test_sharded_model_is_saved_whole(tiny, tmp_path):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    split = lambda path, leaf: NamedSharding(mesh, PartitionSpec(*([None] * (len(leaf.shape) - 1)), "fsdp"))  # noqa: E731
    save_pretrained(from_pretrained(tiny, shardings=split), tmp_path / "out")
    assert bits(load_file(tmp_path / "out/model.safetensors")) == bits(load_file(tiny / "model.safetensors"))


# Heads, prefixes and names


def test_same_model_with_or_without_prefix_and_buffers(tiny, altered):
    expected = bits(named_leaves(from_pretrained(tiny)))

    def bare(tensors):
        return {name.removeprefix("transformer."): x for name, x in tensors.items()}

    def old(tensors):  # what openai-community/gpt2 holds
        buffers = {f"h.{i}.attn.bias": np.ones((1, 1, 73, 73), np.float32) for i in range(3)}
        return bare(tensors) | buffers | {"h.0.attn.masked_bias": np.full((), -1e4, np.float32)}

    def tied_twice(tensors):
        return tensors | {"lm_head.weight": tensors["transformer.wte.weight"].copy()}

    def other_name(tensors):
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
        return tensors

    for tensors in (bare, old, tied_twice, other_name):
        assert bits(named_leaves(from_pretrained(altered(tensors)))) == expected, tensors.__name__


def test_the_checkpoint_decides_the_head(tiny, altered):
    assert type(from_pretrained(tiny)) is LanguageModel
    bare = altered(
        lambda tensors: {name.removeprefix("transformer."): x for name, x in tensors.items()},
        architectures=["GPT2Model"],
    )
    assert type(from_pretrained(bare)) is GPT
    assert type(from_pretrained(tiny, architecture="GPT2Model")) is GPT
    assert type(from_pretrained(bare, architecture="GPT2LMHeadModel")) is LanguageModel  # tied: nothing is missing
    with pytest.raises(ValueError, match="GPT2DoubleHeadsModel is not supported for gpt2; there are GPT2Model, GPT2LM"):
        from_pretrained(altered(architectures=["GPT2DoubleHeadsModel"]))


def untied(tensors):
    return tensors | {"lm_head.weight": np.arange(47 * 24, dtype=np.float32).reshape(47, 24)}


def test_untied_head(altered, tmp_path):
    source = altered(untied, tie_word_embeddings=False)
    model = from_pretrained(source)
    np.testing.assert_array_equal(model.head.kernel[...], np.arange(47 * 24).reshape(47, 24).T)
    save_pretrained(model, tmp_path / "out")
    assert bits(load_file(tmp_path / "out/model.safetensors")) == bits(load_file(source / "model.safetensors"))
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False

    backbone = load_pretrained(source, architecture="GPT2Model")
    assert type(backbone.model) is GPT and backbone.unused == ("lm_head.weight",) and backbone.new == ()


def test_missing_head_is_new_only_on_request(altered, caplog):
    source = altered(tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight \(47, 24\)"):
        from_pretrained(source)
    loaded = load_pretrained(source, new_head=True)
    assert loaded.new == ("head.kernel",)
    assert "head.kernel" in caplog.text
    kernel = np.asarray(loaded.model.head.kernel[...])
    assert 0.01 < kernel.std() < 0.03  # init_std of the configuration
    without = altered(
        lambda tensors: {n: x for n, x in tensors.items() if "ln_f" not in n}, tie_word_embeddings=False
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"missing: transformer\.ln_f\.bias \(24\)\n.*ln_f\.weight") as error:
        from_pretrained(without, new_head=True)
    assert "lm_head" not in str(error.value)


def test_tied_but_different_head_is_an_error(altered):
    with pytest.raises(ValueError, match=r"not a copy: lm_head\.weight differs from transformer\.wte\.weight"):
        from_pretrained(altered(untied))


def test_config_without_architectures(altered):
    bare = lambda tensors: {name.removeprefix("transformer."): x for name, x in tensors.items()}  # noqa: E731
    assert type(from_pretrained(altered(bare, architectures=...))) is GPT
    assert type(from_pretrained(altered(untied, architectures=..., tie_word_embeddings=False))) is LanguageModel
    with pytest.raises(ValueError, match="pass architecture=, one of GPT2Model, GPT2LMHeadModel"):
        from_pretrained(altered(architectures=None))


def test_all_that_does_not_fit_is_listed_at_once(altered):
    def break_four(tensors):
        del tensors["transformer.h.1.attn.c_attn.weight"]
        tensors["transformer.h.0.mlp.c_fc.weight"] = np.zeros((24, 41), np.float32)
        tensors["transformer.h.3.ln_1.bias"] = np.zeros(24, np.float32)
        tensors["transformer.ln_f.bias"] = np.zeros(24, np.int32)
        return tensors | {"stray": np.zeros((2, 1), np.float32)}

    with pytest.raises(ValueError) as error:
        from_pretrained(altered(break_four))
    assert str(error.value).splitlines()[1:] == [
        "  missing: transformer.h.1.attn.c_attn.weight (24, 72)",
        "  unexpected: stray (2, 1)",
        "  unexpected: transformer.h.3.ln_1.bias (24)",
        "  wrong shape: transformer.h.0.mlp.c_fc.weight is (24, 41) in the file, (24, 40) in the model",
        "  wrong type: transformer.ln_f.bias is I32, not one of F16, BF16, F32, F64",
    ]


def test_names_that_only_look_old_are_not_renamed(altered):
    with pytest.raises(ValueError, match=r"unexpected: transformer\.layer_scale\.gamma \(24\)"):
        from_pretrained(altered(lambda t: t | {"transformer.layer_scale.gamma": np.ones(24, np.float32)}))


# config.json


def test_configurations_go_in_and_out(tiny):
    fields = json.loads((tiny / "config.json").read_text())
    config = read_config(dict(fields))
    assert config == GPTConfig(
        vocab_size=47, max_length=73, dim=24, depth=3, heads=3, mlp_dim=40, norm_epsilon=1e-4, bos_id=1, eos_id=2
    )  # fmt: skip
    written = write_config(config)
    assert {name: fields[name] for name in written} == written
    several = read_config(fields | {"eos_token_id": [2, 3], "pad_token_id": 0, "activation_function": "relu"})
    assert (several.eos_id, several.pad_id, several.activation) == ((2, 3), 0, "relu")
    assert read_config(json.loads(json.dumps(write_config(several)))) == several


def test_missing_fields_have_the_values_of_transformers():
    assert read_config({}) == GPTConfig.gpt2(bos_id=50256, eos_id=50256)
    assert read_config({"hidden_size": 60, "num_hidden_layers": 2}).dim == 60


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("activation_function", "mish"),
        ("n_ctx", 512),
        ("rope_scaling", {"factor": 2}),
        ("n_head", 5),
    ],
)
def test_settings_that_are_not_supported_are_named(altered, field, value):
    name = "heads" if field == "n_head" else field
    with pytest.raises(ValueError, match=rf"config\.json.*{name}"):
        from_pretrained(altered(**{field: value}))


def test_fields_without_effect_are_accepted(altered):
    from_pretrained(
        altered(n_ctx=73, task_specific_params={"text-generation": {"max_length": 50}}, _name_or_path="x", custom=None)
    )


def test_changes_to_the_configuration(tiny):
    config = from_pretrained(tiny, changes={"dropout": 0.0, "remat": "full"}).config
    assert (config.dropout, config.remat) == (0.0, "full")
    with pytest.raises(ValueError, match="GPTConfig has no dropuot; there are dtype, "):
        from_pretrained(tiny, changes={"dropuot": 0.0})
    with pytest.raises(ValueError, match=r"dtype='int8' is not one of float32"):
        from_pretrained(tiny, dtype="int8")
