"""Sizes and settings of GPT."""

import jax
import numpy as np
import pytest
from flax import nnx

from transformers_jax.models import GPT, GPTConfig, LanguageModel


def count(config: GPTConfig) -> int:
    def build():
        return LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))

    return sum(int(np.prod(x.shape, dtype=np.int64)) for x in jax.tree.leaves(jax.eval_shape(build)))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As counted from the released checkpoints.
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_gpt2_sizes(name, parameters):
    assert count(getattr(GPTConfig, name)()) == parameters


@pytest.mark.parametrize(
    ("name", "dim", "depth", "heads", "published"),
    [  # Brown et al. 2020, table 2.1; the 13 B model's width of 5140 is no multiple of its 40 heads.
        ("gpt3_small", 768, 12, 12, 125e6),
        ("gpt3_medium", 1024, 24, 16, 350e6),
        ("gpt3_large", 1536, 24, 16, 760e6),
        ("gpt3_xl", 2048, 24, 16, 1.3e9),
        ("gpt3_2_7b", 2560, 32, 32, 2.7e9),
        ("gpt3_6_7b", 4096, 32, 32, 6.7e9),
        ("gpt3_13b", 5120, 40, 40, 13e9),
        ("gpt3_175b", 12288, 96, 96, 175e9),
    ],
)
def test_gpt3_sizes(name, dim, depth, heads, published):
    """By the formula: 12 dim^2 + 13 dim a layer, embeddings of 50,257 tokens and 2,048 positions, the last norm."""
    config = getattr(GPTConfig, name)()
    assert (config.dim, config.depth, config.heads, config.max_length) == (dim, depth, heads, 2048)
    parameters = depth * (12 * dim**2 + 13 * dim) + (50_257 + 2048) * dim + 2 * dim
    assert count(config) == parameters
    assert abs(parameters / published - 1) < 0.03


def test_named_sizes_can_be_changed():
    config = GPTConfig.gpt2_xl(depth=2, vocab_size=11, dropout=0.0)
    assert (config.dim, config.depth, config.vocab_size, config.dropout) == (1600, 2, 11, 0.0)
    untied = GPTConfig(vocab_size=11, max_length=5, dim=6, depth=1, heads=2, mlp_dim=7, tie_embeddings=False)
    layer = 4 * (36 + 6) + 2 * 6 * 7 + 7 + 6 + 4 * 6
    assert count(untied) == layer + 11 * 6 + 5 * 6 + 12 + 11 * 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(dim=10, heads=4), "dim=10 is not a multiple of heads=4"),
        (dict(depth=0), "depth=0 must be at least 1"),
        (dict(max_length=-5), "max_length=-5 must be at least 1"),
        (dict(vocab_size=0), "vocab_size=0 must be at least 1"),
        (dict(mlp_dim=0), "mlp_dim=0 must be at least 1"),
        (dict(heads=0), "heads=0 must be at least 1"),
        (dict(unroll=0), "unroll=0 must be at least 1"),
        (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (dict(attention_dropout=-0.1), "attention_dropout=-0.1 must be at least 0 and below 1"),
        (dict(embedding_dropout=2.0), "embedding_dropout=2.0 must be"),
        (dict(activation="swish"), "unknown activation 'swish'; there are gelu, gelu_tanh"),
        (dict(remat="some"), "unknown remat policy 'some'; there are full, dots, dots_no_batch and None"),
        (dict(dtype="float8"), "dtype='float8' is not one of float32, bfloat16, float16"),
        (dict(param_dtype="int8"), "param_dtype='int8' is not one of"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_impossible_settings_name_fields_and_values(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)


def test_vocab_size_must_be_known_when_the_model_is_built():
    with pytest.raises(ValueError, match="vocab_size is None; give a number"):
        GPT(GPTConfig(vocab_size=None), rngs=nnx.Rngs(0))
