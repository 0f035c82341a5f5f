"""The mesh and the table of rules that says what lies where on it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from transformers_jax.models import (
    GPT,
    Bert,
    BertConfig,
    DaViT,
    DaViTConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    GPTConfig,
    ImageClassifier,
    ImageGPT,
    ImageGPTConfig,
    LanguageModel,
    MaskedLanguageModel,
    RecurrentSeq2Seq,
    RecurrentSeq2SeqConfig,
    Seq2SeqLanguageModel,
    SequenceClassifier,
    SpanPredictor,
    Swin,
    SwinConfig,
    TokenClassifier,
    ViT,
    ViTConfig,
)
from transformers_jax.nn import Linear, constrain
from transformers_jax.nn.sharding import BATCH, TENSOR
from transformers_jax.tasks import LanguageModeling
from transformers_jax.training.mesh import (
    SHARDING_RULES,
    MeshConfig,
    batch_sharding,
    check_batch,
    make_mesh,
    on_mesh,
    put_batch,
    shardings,
)
from transformers_jax.training.paths import named_leaves
from transformers_jax.training.state import TrainState
from transformers_jax.training.step import make_train_step

LABELS = tuple(map(str, range(1000)))


def abstract(head, backbone, config):
    return jax.eval_shape(lambda: head(backbone(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))


def models():
    """One abstract model of every kind, with every optional part somewhere."""
    bert = BertConfig.base(next_sentence=True)
    roberta = BertConfig.roberta_base(labels=LABELS[:3], tie_embeddings=False)
    yield "gpt2", abstract(LanguageModel, GPT, GPTConfig.gpt2())
    yield "untied", abstract(LanguageModel, GPT, GPTConfig.gpt2(tie_embeddings=False))
    yield "image gpt", abstract(LanguageModel, ImageGPT, ImageGPTConfig.small())
    yield "masked lm", abstract(MaskedLanguageModel, Bert, bert)
    for head in (MaskedLanguageModel, SequenceClassifier, TokenClassifier, SpanPredictor):
        yield head.__name__, abstract(head, Bert, roberta)
    for settings in ({}, dict(pooling="attention"), dict(pooler=True)):
        yield str(settings), abstract(ImageClassifier, ViT, ViTConfig.b16(labels=LABELS, **settings))
    own = dict(relative_per_layer=True, use_bias=True, tie_embeddings=False)
    for name, config in {
        "marian": EncoderDecoderConfig.marian(vocab_size=58101),
        "t5": EncoderDecoderConfig.t5_base(gated=True),
        "t5 with biases of each layer": EncoderDecoderConfig.t5_base(**own),
        "big pre-norm": EncoderDecoderConfig.big(vocab_size=32000, norm="pre"),
        "learned positions": EncoderDecoderConfig.base(vocab_size=32000, positions="learned", embedding_norm=True),
        "two vocabularies": EncoderDecoderConfig.marian(vocab_size=32000, target_vocab_size=24000),
    }.items():
        yield name, abstract(Seq2SeqLanguageModel, EncoderDecoder, config)
    deit = ViTConfig.b16(labels=LABELS, distillation_token=True, distillation_head=True)
    yield "deit", abstract(ImageClassifier, ViT, deit)
    yield "davit", abstract(ImageClassifier, DaViT, DaViTConfig.tiny(labels=LABELS))
    yield "swin", abstract(ImageClassifier, Swin, SwinConfig.tiny(labels=LABELS))
    recurrent = RecurrentSeq2SeqConfig.with_attention(vocab_size=32000, cell="lstm", depth=2)
    yield "recurrent", abstract(Seq2SeqLanguageModel, RecurrentSeq2Seq, recurrent)


def test_the_rules_name_every_parameter_and_each_rule_names_some():
    names = {name for _, model in models() for name in named_leaves(model)}
    unnamed = [name for name in names if not any(re.search(pattern, name) for pattern, _ in SHARDING_RULES)]
    assert not unnamed
    for pattern, _ in SHARDING_RULES:
        assert any(re.search(pattern, name) for name in names), pattern


@pytest.mark.parametrize(("kind", "model"), models(), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("axes", [dict(fsdp=8), dict(fsdp=4, tensor=2), dict(data=2, fsdp=4)], ids=str)
def test_a_device_holds_its_share_of_parameters_and_optimizer(kind, model, axes):
    config = MeshConfig(**axes)
    state = jax.eval_shape(lambda: TrainState.create(model, optax.adamw(1e-3)))
    placed = shardings(state, make_mesh(config))
    leaves = list(zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True))
    whole = sum(x.size * x.dtype.itemsize for x, _ in leaves)
    share = sum(np.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in leaves)
    assert share <= 1.05 * whole / (config.fsdp * config.tensor)


def test_an_axis_that_does_not_divide_moves_to_the_columns_or_leaves_the_array_whole(caplog):
    model = abstract(LanguageModel, GPT, GPTConfig(vocab_size=47, max_length=12, dim=16, depth=2, heads=2, mlp_dim=30))
    placed = named_leaves(shardings(model, make_mesh(MeshConfig(fsdp=2, tensor=4))))
    assert placed["backbone.embedding.embedding"].spec == PartitionSpec(None, ("tensor", "fsdp"))
    assert (
        "backbone.embedding.embedding: 47 is not divisible by tensor=4: it is spread over its dimension of 16"
        in caplog.text
    )
    assert placed["backbone.stack.layers.0.mlp.up.bias"].spec == PartitionSpec(None, None)
    assert "mlp.up.bias: 30 is not divisible by tensor=4: it is whole on every device" in caplog.text


def test_a_matrix_of_a_model_of_ones_own_that_no_rule_names_is_whole_and_that_is_said(caplog):
    model = jax.eval_shape(lambda: {"mixer": Linear(16, 16, rngs=nnx.Rngs(0))})
    mesh = make_mesh(MeshConfig(fsdp=8))
    assert named_leaves(shardings(model, mesh))["mixer.kernel"].spec == PartitionSpec(None, None)
    assert "mixer.kernel: no sharding rule names it" in caplog.text
    placed = shardings(model, mesh, rules=[(r"mixer\.kernel$", ("fsdp", None)), *SHARDING_RULES])
    assert named_leaves(placed)["mixer.kernel"].spec == PartitionSpec("fsdp", None)
    with pytest.raises(ValueError, match=r"the sharding rule 'mixr' matches none of the 2 arrays, such as mixer\.bias"):
        shardings(model, mesh, rules=[("mixr", ("fsdp", None))])
    with pytest.raises(ValueError, match=r"'kernel' names the axis 'model'; the mesh has data, fsdp, tensor"):
        shardings(model, mesh, rules=[("kernel", ("model", None))])


def test_models_are_built_in_parts_and_a_step_overwrites_the_state_it_is_given():
    config = GPTConfig(vocab_size=64, max_length=12, dim=64, depth=2, heads=8, dropout=0.0, attention_dropout=0.0)
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    optimizer = optax.adamw(1e-3)

    def create():
        return TrainState.create(LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)), optimizer)

    placed = shardings(jax.eval_shape(create), mesh)
    build = jax.jit(create, out_shardings=placed).lower().compile()
    state = build()
    memory, whole = build.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(state))
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < whole / 2  # of one device
    kernel = state.model.backbone.stack.layers[0].mlp.up.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 64 // 4, 256 // 2)}

    step = jax.jit(
        on_mesh(make_train_step(LanguageModeling().loss, optimizer), mesh),
        out_shardings=(placed, None),
        donate_argnums=0,
    )
    rows = np.random.default_rng(0).integers(0, 64, (8, 12)).astype(np.int32)
    batch = put_batch({"input_ids": rows, "labels": rows}, batch_sharding(mesh))
    before = live_bytes()
    for _ in range(2):
        old, (state, metrics) = state, step(state, batch)
        jax.block_until_ready(state)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
    numbers = sum(x.nbytes for x in jax.tree.leaves(metrics))
    assert live_bytes() <= before + numbers


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def test_constraints_spread_what_an_axis_divides_and_do_nothing_without_a_mesh():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def layout(size, *axes, mesh=mesh):
        found = []
        with jax.set_mesh(mesh):
            jax.jit(lambda x: jax.debug.inspect_array_sharding(constrain(x, *axes), callback=found.append))(
                jnp.zeros(size)
            )
        return found[0].shard_shape(size)

    assert layout((8, 6, 4), BATCH, None, TENSOR) == (2, 6, 2)
    assert layout((2, 6, 3), BATCH, None, TENSOR) == (1, 6, 3)  # fsdp and tensor do not divide what is left
    assert layout((1, 6), BATCH) == (1, 6)
    x = jnp.ones((8, 4))
    assert constrain(x, BATCH, TENSOR) is x
    inside = jax.shard_map(
        lambda x: constrain(x, BATCH), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")
    )
    np.testing.assert_array_equal(jax.jit(inside)(x), x)
    others = Mesh(np.asarray(jax.devices()).reshape(8), ("rows",), axis_types=(AxisType.Auto,))
    assert on_mesh(lambda x: constrain(x, BATCH), others)(x) is x


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (dict(data=2, fsdp=4, tensor=2), r"data=2 x fsdp=4 x tensor=2 does not make the 8 devices"),
        (dict(data=1), r"data=1 x fsdp=1 x tensor=1 does not make the 8 devices"),
        (dict(fsdp=3), r"data=-1 x fsdp=3 x tensor=1 does not make the 8 devices"),
        (dict(fsdp=16), r"data=-1 x fsdp=16 x tensor=1 does not make the 8 devices"),
        (dict(fsdp=0), r"must be at least 1"),
        (dict(data=-2), r"must be at least 1"),
        (dict(devices=9), r"mesh\.devices=9 of 8 devices"),
        (dict(devices=0), r"mesh\.devices=0 of 8 devices"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_make_the_devices_is_an_error_with_the_numbers(axes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(MeshConfig(**axes))


def test_a_batch_that_does_not_divide_is_an_error_with_the_numbers():
    mesh = make_mesh(MeshConfig(data=4, fsdp=2))
    with pytest.raises(ValueError, match="batch_size=12 is not a multiple of 16 = data 4 x fsdp 2 x accumulation 2"):
        check_batch(12, 2, mesh)
    check_batch(32, 2, mesh)
    batch = put_batch({"x": np.arange(16)}, batch_sharding(mesh))
    assert [shard.data.tolist() for shard in batch["x"].addressable_shards][:2] == [[0, 1], [2, 3]]
