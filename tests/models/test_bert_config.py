"""Sizes that are the published ones, and configurations that are refused."""

import dataclasses

import jax
import pytest
from flax import nnx

from transformers_jax.models import Bert, BertConfig, MaskedLanguageModel, SequenceClassifier, TokenClassifier


def count(config, head=None):
    def build():
        model = Bert(config.for_head(head), rngs=nnx.Rngs(0))
        return model if head is None else head(model, rngs=nnx.Rngs(0))

    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(build)))


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("tiny", 4_385_920),
        ("mini", 11_170_560),
        ("small", 28_763_648),
        ("medium", 41_373_184),
        ("base", 109_482_240),
        ("large", 335_141_888),
        ("minilm_l6", 22_713_216),
        ("roberta_base", 124_645_632),
        ("roberta_large", 355_359_744),
        ("distilbert", 66_362_880),
    ],
)
def test_sizes(size, parameters):
    """As many parameters as the models of transformers have (BertModel, RobertaModel, DistilBertModel)."""
    assert count(getattr(BertConfig, size)()) == parameters


def test_parameters_of_heads():
    """BertForMaskedLM, BertForPreTraining, BertForSequenceClassification and RobertaForSequenceClassification."""
    base, labels = BertConfig.base(), {"labels": ("no", "yes")}
    assert count(base, MaskedLanguageModel) == 109_514_298
    assert count(dataclasses.replace(base, next_sentence=True), MaskedLanguageModel) == 110_106_428
    assert count(dataclasses.replace(base, **labels), SequenceClassifier) == 109_483_778
    assert count(BertConfig.roberta_base(**labels), SequenceClassifier) == 124_647_170
    assert count(BertConfig.distilbert(**labels), SequenceClassifier) == 66_955_010


def test_sizes_can_be_changed():
    config = BertConfig.large(depth=2, labels=("a", "b"))
    assert (config.depth, config.dim, config.labels) == (2, 1024, ("a", "b"))


def test_floating_point_operations():
    """Six for each weight of a matrix product, and for attention twelve times length and width a layer."""
    config = BertConfig(depth=2, dim=6, heads=2, mlp_dim=10)
    assert config.flops_per_token(8) == 6 * 2 * (4 * 36 + 2 * 60) + 12 * 2 * 6 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "dim=768 is not a multiple of heads=5"),
        ({"depth": 0}, "depth=0 must be at least 1"),
        ({"max_length": 0}, "max_length=0 must be at least 1"),
        ({"vocab_size": -1}, "vocab_size=-1 must be at least 1"),
        ({"mlp_dim": 0}, "mlp_dim=0 must be at least 1"),
        ({"dropout": 1.0}, r"dropout=1\.0 must be at least 0 and below 1"),
        ({"attention_dropout": -0.1}, r"attention_dropout=-0\.1 must be"),
        ({"classifier_dropout": 2.0}, r"classifier_dropout=2\.0 must be"),
        ({"token_types": -1}, "token_types=-1 must not be negative"),
        ({"position_offset": -2}, "position_offset=-2 must not be negative"),
        ({"activation": "mish"}, "mish"),
        ({"classifier_activation": "mish"}, "mish"),
        ({"remat": "some"}, "some"),
        ({"dtype": "int8"}, "dtype='int8' is not one of float32"),
        ({"labels": ("a", "b", "a")}, "holds a name twice"),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        BertConfig(**changes)


def test_what_a_model_lacks_is_said_when_it_is_built():
    tiny = BertConfig.tiny(vocab_size=None)
    with pytest.raises(ValueError, match="vocab_size is None"):
        Bert(tiny, rngs=nnx.Rngs(0))
    backbone = Bert(
        BertConfig(vocab_size=7, dim=4, depth=1, heads=1, pooler=False, next_sentence=True), rngs=nnx.Rngs(0)
    )
    for head in (SequenceClassifier, TokenClassifier):
        with pytest.raises(ValueError, match=r"labels is empty; name what the classifier is to tell apart"):
            head(backbone, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="next_sentence=True reads the pooler; set pooler=True"):
        MaskedLanguageModel(backbone, rngs=nnx.Rngs(0))
