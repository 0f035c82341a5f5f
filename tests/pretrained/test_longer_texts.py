"""Checkpoints of texts for longer ones: learned positions begin again, on request."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.models import (
    GPT,
    Bert,
    BertConfig,
    EncoderDecoderConfig,
    GPTConfig,
    LanguageModel,
    MaskedLanguageModel,
)
from transformers_jax.models.encoder_decoder import EncoderDecoder, Seq2SeqLanguageModel
from transformers_jax.pretrained import from_pretrained, save_pretrained

SIZES = dict(vocab_size=40, dim=16, depth=2, heads=2, max_length=12, init_std=0.3)


def decoder():
    return LanguageModel(GPT(GPTConfig(**SIZES), rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


def encoder():
    config = BertConfig.roberta_base(**SIZES, classifier_activation=None)
    return MaskedLanguageModel(Bert(config.for_head(MaskedLanguageModel), rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


def both():
    config = EncoderDecoderConfig.bart_base(**SIZES, pad_id=1)
    return Seq2SeqLanguageModel(EncoderDecoder(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


@pytest.mark.parametrize("make", [decoder, encoder, both])
def test_positions_begin_again(make, tmp_path, caplog):
    model = make()
    save_pretrained(model, tmp_path)
    with caplog.at_level(logging.WARNING):
        longer = from_pretrained(tmp_path, changes={"max_length": 29})
    assert "resized: " in caplog.text and longer.config.max_length == 29
    prefix = getattr(model.config, "position_offset", 0)
    sides = [lambda backbone: backbone.positions]
    if make is both:
        sides = [lambda backbone: backbone.encoder.positions, lambda backbone: backbone.decoder.positions]
    for side in sides:
        before, after = (np.asarray(side(x.backbone).embedding[...]) for x in (model, longer))
        assert len(before) == prefix + 12 and len(after) == prefix + 29
        np.testing.assert_array_equal(after[:prefix], before[:prefix])
        for row, vector in enumerate(after[prefix:]):
            np.testing.assert_array_equal(vector, before[prefix + row % 12])
    ids = jnp.asarray(np.random.default_rng(0).integers(3, 40, (2, 29)))
    target = dict(decoder_input_ids=ids[:, :20]) if make is both else {}
    assert np.isfinite(longer(ids, **target).logits).all()
    target = dict(decoder_input_ids=ids[:, :7]) if make is both else {}
    np.testing.assert_allclose(longer(ids[:, :12], **target).logits, model(ids[:, :12], **target).logits, atol=1e-6)
    with pytest.raises(ValueError, match="29"):
        model(ids, **target)
    shorter = from_pretrained(tmp_path, changes={"max_length": 8})
    np.testing.assert_allclose(shorter(ids[:, :8], **target).logits, model(ids[:, :8], **target).logits, atol=1e-6)


def test_a_training_asks_for_it():
    held = GPTConfig(**SIZES)
    longer = dict(SIZES, max_length=50)
    assert held.with_run_fields(GPTConfig(**longer)).max_length == 12
    config = held.with_run_fields(GPTConfig(**longer, resize_positions=True, embedding_dropout=0.3))
    assert config.max_length == 50 and config.embedding_dropout == 0.3
    names = {name: jnp.zeros((12, 16)) for name in ("positions.embedding", "backbone.positions.embedding", "other")}
    shapes = jax.tree.map(lambda x: x.shape, config.carry_over(names, held))
    assert shapes == {"positions.embedding": (50, 16), "backbone.positions.embedding": (50, 16), "other": (12, 16)}
