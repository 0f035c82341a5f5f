"""Checkpoints as people have them: prefixes or none, old names, poolers, other heads, labels; without PyTorch."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from transformers_jax.models import (
    GPT,
    Bert,
    BertConfig,
    GPTConfig,
    LanguageModel,
    MaskedLanguageModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from transformers_jax.pretrained import from_pretrained, load_pretrained, save_pretrained
from transformers_jax.pretrained.engine import named_leaves

IDS = np.random.default_rng(0).integers(2, 31, (2, 7)).astype(np.int32)
SIZES = dict(vocab_size=31, max_length=9, dim=12, depth=2, heads=3, mlp_dim=20, init_std=0.3)
FAMILIES = {
    "bert": {},
    "roberta": dict(token_types=1, position_offset=2, classifier_activation="tanh", pad_id=1, norm_epsilon=1e-5),
    "distilbert": dict(token_types=0, pooler=False, classifier_activation="relu"),
}
HEADS = (None, MaskedLanguageModel, SequenceClassifier, TokenClassifier, SpanPredictor)
PREFIX = {"bert": "bert.", "roberta": "roberta.", "distilbert": "distilbert."}


def build(head=None, family="bert", **changes):
    """A model with every parameter random, biases and norms too."""
    labels = {"labels": ("a", "b", "c")} if head in (SequenceClassifier, TokenClassifier) else {}
    config = BertConfig(**SIZES | FAMILIES[family] | labels | changes).for_head(head)
    model = Bert(config, rngs=nnx.Rngs(0))
    model = model if head is None else head(model, rngs=nnx.Rngs(1))
    keys = iter(jax.random.split(jax.random.key(2), 99))
    return jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape), model)


def without(*patterns):
    def change(tensors):
        return {n: x for n, x in tensors.items() if not any(re.search(pattern, n) for pattern in patterns)}

    return change


def bare(tensors):
    return {re.sub(r"^(bert|roberta|distilbert)\.", "", name): value for name, value in tensors.items()}


def as_google_wrote_it(tensors):
    """Old names of layer norms, buffers, and the shared tensors once more."""
    old = {re.sub("LayerNorm.weight$", "LayerNorm.gamma", name): value for name, value in tensors.items()}
    old = {re.sub("LayerNorm.bias$", "LayerNorm.beta", name): value for name, value in old.items()}
    old["bert.embeddings.position_ids"] = np.arange(9)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].copy()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].copy()
    return old


def assert_same(model, other, *, but=()):
    ours, theirs = named_leaves(model), named_leaves(other)
    for path, leaf in theirs.items():
        if path not in but:
            np.testing.assert_array_equal(ours[path], leaf, err_msg=path)


def bits(path):
    tensors = load_file(path / "model.safetensors")
    return {name: (x.dtype, x.shape, np.ascontiguousarray(x).tobytes()) for name, x in tensors.items()}


# Round trips


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__ if head else "none")
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_identical(family, head, kind, written, tmp_path):
    def typed(tensors):
        return {name: x.astype(jnp.dtype(kind)) for name, x in tensors.items()}

    problem = {"problem_type": "multi_label_classification"} if head is SequenceClassifier else {}
    first = written(build(head, family, **problem), typed)
    loaded = load_pretrained(first)
    assert loaded.new == loaded.unused == ()
    assert type(loaded.model) is (Bert if head is None else head)
    save_pretrained(loaded.model, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(first)
    fields, again = (json.loads((path / "config.json").read_text()) for path in (first, tmp_path / "out"))
    assert fields | {"dtype": kind} == again and fields["model_type"] == family
    assert from_pretrained(tmp_path / "out").config == loaded.model.config
    if head is SequenceClassifier:
        assert fields["id2label"] == {"0": "a", "1": "b", "2": "c"}
        assert loaded.model.config.problem_type == "multi_label_classification"


def test_a_read_model_is_like_a_built_one(written):
    """So that a compiled step, an optimizer's state or a checkpoint of one fits the other."""
    model = from_pretrained(written(build(SequenceClassifier, "roberta")))
    built = SequenceClassifier(Bert(model.config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    assert jax.tree.structure(model) == jax.tree.structure(built)
    assert [jax.typeof(leaf) for leaf in jax.tree.leaves(model)] == [
        jax.typeof(leaf) for leaf in jax.tree.leaves(built)
    ]


# What people have


def test_a_file_like_bert_base_uncased(written):
    """config.json says BertForMaskedLM, but the file holds next-sentence prediction and a pooler, under old names."""
    model = build(MaskedLanguageModel, next_sentence=True)
    directory = written(model, as_google_wrote_it, architectures=["BertForMaskedLM"])
    loaded = load_pretrained(directory)
    assert (loaded.architecture, loaded.new, loaded.unused) == ("BertForPreTraining", (), ())
    assert loaded.model.config.next_sentence and loaded.model.config.pooler
    assert_same(loaded.model, model)
    assert_same(from_pretrained(written(model, lambda tensors: bare(as_google_wrote_it(tensors)))), model)

    # The parts of it that one asks for; what is not asked for is reported.
    bare_model = load_pretrained(directory, architecture=Bert)
    assert bare_model.model.config.pooler and bare_model.new == ()
    assert "cls.seq_relationship.weight" in bare_model.unused and "cls.predictions.bias" in bare_model.unused
    masked = load_pretrained(directory, architecture=MaskedLanguageModel, changes={"next_sentence": False})
    assert masked.architecture == "BertForMaskedLM" and masked.new == ()
    assert masked.unused == (
        *("bert.pooler.dense.bias", "bert.pooler.dense.weight"),
        *("cls.seq_relationship.bias", "cls.seq_relationship.weight"),
    )
    assert load_pretrained(directory, architecture=MaskedLanguageModel).architecture == "BertForPreTraining"
    classifier = load_pretrained(
        directory, architecture=SequenceClassifier, new_head=True, changes={"labels": ("x", "y", "z")}
    )
    assert classifier.new == ("head.bias", "head.kernel")
    assert classifier.model.config.labels == ("x", "y", "z")
    assert_same(classifier.model.backbone, model.backbone)


def test_a_file_like_roberta_base(written, caplog):
    """A masked language model beside which an older transformers stored a pooler that it does not use."""
    model = build(MaskedLanguageModel, "roberta")
    pooler = {"roberta.pooler.dense.weight": np.ones((12, 12), np.float32)}
    pooler |= {"roberta.pooler.dense.bias": np.ones(12, np.float32), "roberta.embeddings.position_ids": np.arange(11)}
    pooler |= {"lm_head.decoder.bias": np.asarray(model.bias[...])}
    loaded = load_pretrained(written(model, lambda tensors: tensors | pooler))
    assert loaded.architecture == "RobertaForMaskedLM"
    assert loaded.unused == ("roberta.pooler.dense.bias", "roberta.pooler.dense.weight")
    assert "roberta.pooler.dense.bias" in caplog.text
    assert_same(loaded.model, model)


def test_a_pooler_decides_what_a_bare_model_is(written):
    directory = written(build(pooler=True))
    assert from_pretrained(directory)(jnp.asarray(IDS)).pooled.shape == (2, 12)
    assert from_pretrained(written(build(pooler=False)))(jnp.asarray(IDS)).pooled is None
    left = load_pretrained(directory, changes={"pooler": False})
    assert left.model.pooler is None and left.unused == ("pooler.dense.bias", "pooler.dense.weight")


def test_settings_of_published_configurations_are_accepted(written):
    google = dict(directionality="bidi", pooler_type="first_token_transform", pooler_fc_size=768, output_past=True)
    from_pretrained(written(build(), **google, language="english", name="Bert", gradient_checkpointing=False))
    distil = dict(sinusoidal_pos_embds=False, tie_weights_=True, qa_dropout=0.1, seq_classif_dropout=0.2)
    model = from_pretrained(written(build(family="distilbert"), **distil))
    assert model.config.classifier_dropout == 0.2
    token = written(build(TokenClassifier, "distilbert"), **distil)
    assert from_pretrained(token).config.classifier_dropout is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("hidden_act", "mish"),
        ("embedding_size", 128),
    ],
)
def test_settings_that_are_not_supported_are_named(written, field, value):
    with pytest.raises(ValueError, match=rf"config\.json.*{field}"):
        from_pretrained(written(build(), **{field: value}))


def test_robertas_positions_need_a_padding_id(written):
    with pytest.raises(ValueError, match="pad_token_id to null"):
        from_pretrained(written(build(family="roberta"), pad_token_id=None))
    with pytest.raises(ValueError, match="max_position_embeddings to 2, of which the first 2 are unused"):
        from_pretrained(written(build(family="roberta"), max_position_embeddings=2))
    with pytest.raises(ValueError, match="RobertaForMaskedLM of transformers has activation='gelu', not 'relu'"):
        from_pretrained(written(build(MaskedLanguageModel, "roberta"), hidden_act="relu"))


def test_heads_that_are_not_offered(written):
    with pytest.raises(
        ValueError, match="BertForMultipleChoice is not supported for bert; there are BertModel, BertFor"
    ):
        from_pretrained(written(build(), architectures=["BertForMultipleChoice"]))
    with pytest.raises(
        ValueError, match="there is no LanguageModel for bert; there are Bert, MaskedLanguageModel, Seq"
    ):
        from_pretrained(written(build()), architecture=LanguageModel)


# From one head to another


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", [True, False])
def test_bare_file_into_every_head(family, prefix, written):
    """The new parameters are exactly those of the head, and everything else is the file's."""
    model = build(family=family)

    def named(tensors):
        return {PREFIX[family] + name if prefix else name: value for name, value in tensors.items()}

    directory = written(model, named)
    changes = {"labels": ("x", "y", "z", "w")}
    for head in HEADS[1:]:
        with pytest.raises(ValueError, match=r"missing: .*; pass new_head=True to start it afresh"):
            from_pretrained(directory, architecture=head, changes=changes)
        loaded = load_pretrained(directory, architecture=head, changes=changes, new_head=True)
        own = {path for path in named_leaves(loaded.model) if not path.startswith("backbone.")}
        assert set(loaded.new) == own and own
        assert_same(model, loaded.model.backbone)
        spare = {name for name in named(bare(load_file(directory / "model.safetensors"))) if "pooler" in name}
        assert set(loaded.unused) == (set() if loaded.model.config.pooler else spare)
        assert loaded.model.head is None or loaded.model.head.bias.shape == ((2,) if head is SpanPredictor else (4,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS[1:], ids=lambda head: head.__name__)
def test_head_file_into_bare_model(family, head, written):
    model = build(head, family)
    loaded = load_pretrained(written(model), architecture=Bert)
    assert_same(loaded.model, model.backbone)
    assert loaded.new == () and loaded.unused
    assert not any(name.startswith(PREFIX[family]) for name in loaded.unused)


def test_a_head_of_another_kind_is_never_taken_for_ones_own(written):
    """classifier.weight of a sentence classifier is no token classifier's, though the names and sizes are equal."""
    model = build(SequenceClassifier)
    directory = written(model)
    with pytest.raises(ValueError, match=r"missing: classifier\.weight \(3, 12\); pass new_head=True"):
        from_pretrained(directory, architecture=TokenClassifier)
    loaded = load_pretrained(directory, architecture="BertForTokenClassification", new_head=True)
    assert loaded.new == ("head.bias", "head.kernel")
    assert loaded.unused == (
        *("bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"),
    )
    assert not np.array_equal(loaded.model.head.kernel[...], model.head.kernel[...])


def test_masked_language_model_without_pooler_becomes_a_classifier(written):
    model = build(MaskedLanguageModel)
    directory = written(model)
    with pytest.raises(ValueError, match=r"missing: bert\.pooler\.dense\.bias \(12\)"):
        from_pretrained(directory, architecture=SequenceClassifier)
    loaded = load_pretrained(directory, architecture=SequenceClassifier, new_head=True)
    assert loaded.new == ("backbone.pooler.bias", "backbone.pooler.kernel", "head.bias", "head.kernel")
    assert loaded.model.config.labels == ("LABEL_0", "LABEL_1")
    assert_same(loaded.model.backbone, model.backbone)
    sentences = load_pretrained(
        directory, architecture=MaskedLanguageModel, changes={"next_sentence": True}, new_head=True
    )
    assert sentences.new == (
        *("backbone.pooler.bias", "backbone.pooler.kernel", "next_sentence.bias", "next_sentence.kernel"),
    )
    assert_same(sentences.model, model)


def test_a_classifier_that_transformers_does_not_have(written, tmp_path):
    """Mean pooling and a dense layer on a BERT: trained from its weights, but not written as something else."""
    changes = {"classifier_activation": "tanh", "pooling": "mean", "labels": ("x", "y")}
    loaded = load_pretrained(written(build()), architecture=SequenceClassifier, changes=changes, new_head=True)
    assert loaded.new == ("dense.bias", "dense.kernel", "head.bias", "head.kernel")
    with pytest.raises(
        ValueError, match="BertForSequenceClassification of transformers has classifier_activation=None"
    ):
        save_pretrained(loaded.model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "head", "changes", "message"),
    [
        (
            "distilbert",
            None,
            {"norm_epsilon": 1e-5},
            "DistilBertModel of transformers has norm_epsilon=1e-12, not 1e-05",
        ),
        ("distilbert", SequenceClassifier, {"classifier_activation": "tanh"}, "has classifier_activation='relu'"),
        ("distilbert", SequenceClassifier, {"pooling": "mean"}, "has pooling='first'"),
        ("roberta", SequenceClassifier, {"classifier_activation": None}, "has classifier_activation='tanh'"),
        ("roberta", None, {"pad_id": 0}, "RobertaModel of transformers has pad_id=1, not 0"),
        ("roberta", MaskedLanguageModel, {"activation": "relu"}, "has activation='gelu'"),
        ("roberta", None, {"token_types": 0}, "no layout known here for Bert"),
    ],
)
def test_what_transformers_would_compute_otherwise_is_not_written(family, head, changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        save_pretrained(build(head, family, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Strictness


@pytest.mark.parametrize("new_head", [False, True])
def test_nothing_of_the_layers_may_be_missing(written, new_head):
    directory = written(build(SequenceClassifier), without(r"layer\.1\.attention\.self\.key\.weight"))
    with pytest.raises(ValueError) as error:
        from_pretrained(directory, new_head=new_head)
    assert str(error.value).splitlines()[1:] == ["  missing: bert.encoder.layer.1.attention.self.key.weight (12, 12)"]


def test_only_the_norms_of_old_files_are_renamed(written):
    stray = {"bert.encoder.layer.0.layer_scale.gamma": np.ones(12, np.float32)}
    with pytest.raises(ValueError, match=r"unexpected: bert\.encoder\.layer\.0\.layer_scale\.gamma \(12\)"):
        from_pretrained(written(build(SequenceClassifier), lambda tensors: tensors | stray))
    with pytest.raises(ValueError, match=r"twice: bert\.embeddings\.LayerNorm\.gamma and bert\.embeddings\.LayerNorm"):
        gamma = {"bert.embeddings.LayerNorm.gamma": np.ones(12, np.float32)}
        from_pretrained(written(build(SequenceClassifier), lambda tensors: tensors | gamma))


def test_copies_must_be_copies(written):
    other = {"cls.predictions.decoder.bias": np.ones(31, np.float32)}
    with pytest.raises(
        ValueError, match=r"not a copy: cls\.predictions\.decoder\.bias differs from cls\.predictions\.b"
    ):
        from_pretrained(written(build(MaskedLanguageModel), lambda tensors: tensors | other))

    def renamed(tensors):  # a file may keep either name
        tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")
        return tensors

    assert_same(from_pretrained(written(build(MaskedLanguageModel), renamed)), build(MaskedLanguageModel))


def test_untied_output_layer(written):
    """transformers reads the decoder's bias then; the other of the two has no effect, and is reported if it differs."""
    model = build(MaskedLanguageModel, tie_embeddings=False)
    directory = written(model)
    assert "cls.predictions.decoder.bias" in load_file(directory / "model.safetensors")
    assert_same(from_pretrained(directory), model)
    loaded = load_pretrained(
        written(model, lambda tensors: tensors | {"cls.predictions.bias": np.zeros(31, np.float32)})
    )
    assert_same(loaded.model, model)
    assert loaded.unused == ("cls.predictions.bias",)


def test_config_without_architectures(written):
    for head, expected in [(None, Bert), (MaskedLanguageModel, MaskedLanguageModel), (SpanPredictor, SpanPredictor)]:
        assert type(from_pretrained(written(build(head), architectures=...))) is expected
    pretraining = written(build(MaskedLanguageModel, next_sentence=True), architectures=...)
    assert load_pretrained(pretraining).architecture == "BertForPreTraining"
    roberta = written(build(SequenceClassifier, "roberta"), architectures=...)
    assert type(from_pretrained(roberta)) is SequenceClassifier
    with pytest.raises(ValueError, match="names no architecture and the tensors do not tell; pass architecture="):
        from_pretrained(written(build(TokenClassifier), architectures=...))


# Labels


def test_labels_of_another_number_need_a_new_head(written):
    directory = written(build(SequenceClassifier, "roberta"))
    changes = {"labels": ("x", "y")}
    wrong = r"wrong shape: classifier\.out_proj\.bias is \(3\) in the file, \(2\) in the model; pass new_head=True"
    with pytest.raises(ValueError, match=wrong):
        from_pretrained(directory, changes=changes)
    loaded = load_pretrained(directory, changes=changes, new_head=True)
    assert loaded.new == ("head.bias", "head.kernel")
    assert loaded.unused == ("classifier.out_proj.bias", "classifier.out_proj.weight")
    assert loaded.model.head.kernel.shape == (12, 2) and loaded.model.config.labels == ("x", "y")
    assert_same(loaded.model.dense, build(SequenceClassifier, "roberta").dense)
    assert load_pretrained(directory, new_head=True).new == ()  # what the file holds stays


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({"id2label": {"2": "z", "0": "x", "1": "y"}}, ("x", "y", "z")),
        ({"id2label": ..., "label2id": {"y": 1, "x": 0, "z": 2}}, ("x", "y", "z")),
        ({"id2label": ..., "label2id": ..., "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"id2label": ..., "label2id": ..., "_num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
    ],
)
def test_labels_of_config_json(written, fields, labels):
    assert from_pretrained(written(build(SequenceClassifier), **fields)).config.labels == labels


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {"1": "a", "2": "b", "3": "c"}}, "id2label must number the labels 0 to 2, but has 1, 2, 3"),
        ({"id2label": {"one": "a"}}, "id2label must number the labels 0 to 0, but has one"),
        ({"id2label": {"0": "a", "1": "a", "2": "c"}}, "holds a name twice"),
        ({"problem_type": "guessing"}, "problem_type.*guessing"),
    ],
)
def test_labels_that_make_no_sense(written, fields, message):
    with pytest.raises(ValueError, match=f"(?s)config.json: .*{message}"):
        from_pretrained(written(build(SequenceClassifier), **fields))


def test_without_labels_a_classifier_has_the_two_of_transformers(written):
    model = build(SequenceClassifier, labels=("LABEL_0", "LABEL_1"))
    loaded = from_pretrained(written(model, id2label=..., label2id=...))
    assert loaded.config.labels == ("LABEL_0", "LABEL_1")


def test_only_classifiers_carry_labels(written):
    fields = {"id2label": {"0": "x", "1": "y"}, "label2id": {"x": 0, "y": 1}, "problem_type": "regression"}
    for head in (None, MaskedLanguageModel, SpanPredictor):
        config = from_pretrained(written(build(head), **fields)).config
        assert (config.labels, config.problem_type) == ((), None)
    spans = load_pretrained(written(build(SequenceClassifier)), architecture=SpanPredictor, new_head=True).model
    assert "id2label" not in json.loads((written(spans) / "config.json").read_text())


# GPT-2's classifiers


@pytest.mark.parametrize("head", [SequenceClassifier, TokenClassifier, SpanPredictor])
def test_gpt2_classifiers(head, written, tmp_path):
    config = GPTConfig(
        vocab_size=31,
        max_length=9,
        dim=12,
        depth=2,
        heads=3,
        init_std=0.3,
        labels=("a", "b", "c"),
        pad_id=0,
        classifier_dropout=0.3,
    )
    model = head(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    directory = written(model)
    assert not (directory / "generation_config.json").exists()
    loaded = load_pretrained(directory)
    assert type(loaded.model) is head and loaded.new == loaded.unused == ()
    assert_same(loaded.model, model)
    if head is not SpanPredictor:
        assert loaded.model.config == config
    assert type(from_pretrained(directory, architecture=GPT)) is GPT
    save_pretrained(LanguageModel(model.backbone, rngs=nnx.Rngs(0)), tmp_path / "lm")
    fresh = load_pretrained(tmp_path / "lm", architecture=head, new_head=True, changes={"labels": ("x", "y")})
    assert all(path.startswith("head.") for path in fresh.new) and fresh.new
    assert_same(fresh.model.backbone, model.backbone)
