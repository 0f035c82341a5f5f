"""Attention patterns in the configurations of the models."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax import nn
from transformers_jax.generation import Sampling, beam_search, generate
from transformers_jax.models import (
    GPT,
    Bert,
    BertConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    GPTConfig,
    LanguageModel,
    ViT,
    ViTConfig,
)
from transformers_jax.models.encoder_decoder import Seq2SeqLanguageModel

SIZES = dict(dim=32, depth=4, heads=4, init_std=0.3)
BANDED = ("causal", "causal & local(3)")
GLOBAL = ("causal & (local(2) | global(2))", "causal & local(4)")


def gpt(patterns, **changes):
    config = GPTConfig(vocab_size=40, max_length=48, patterns=patterns, **SIZES | changes)
    return jax.jit(lambda: LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))()


def ids(batch=2, length=20, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(40, size=(batch, length)))


run = jax.jit(lambda model, *args, **named: model(*args, **named).logits)
step = jax.jit(lambda model, ids, mask, cache: model(ids, mask, cache=cache))


def test_layers_take_their_patterns_in_turn():
    config = GPTConfig(vocab_size=40, max_length=48, patterns=BANDED, **SIZES)
    model = GPT(config, rngs=nnx.Rngs(0))
    weights = np.asarray(model(ids(), capture=["attention_weights"]).attention_weights)
    dense, banded = nn.Causal().mask(20, 20), (nn.Causal() & nn.Local(3)).mask(20, 20)
    for layer, mask in zip(weights, (dense, banded, dense, banded), strict=True):
        assert (layer[:, :, ~np.asarray(mask)] == 0).all() and (layer[:, :, np.asarray(mask)] > 0).all()


@pytest.mark.parametrize("patterns", [BANDED, GLOBAL], ids=str)
@pytest.mark.parametrize("laid_out", [False, True])
def test_a_cache_gives_what_the_whole_gives(patterns, laid_out):
    """Chunks longer and shorter than the window; left padding in one row. Laid out, local layers keep what they see."""
    model = gpt(patterns)
    mask = np.ones((2, 20), int)
    mask[1, :7] = 0
    whole = run(model, ids(), mask)
    if laid_out:
        model = jax.jit(nn.unstack)(model)
    cache, parts, index = model.init_cache(2, 20), [], 0
    if laid_out:
        slots = [layer.key.shape[2] for layer in cache.layers]
        assert slots == ([20, 4] * 2 if patterns == BANDED else [20, 5] * 2)
    for length in (9, 1, 1, 2, 6, 1):
        part = slice(index, index + length)
        output = step(model, ids()[:, part], mask[:, part], cache)
        cache, index = output.cache, index + length
        parts.append(output.logits)
    found = jnp.concatenate(parts, axis=1)
    np.testing.assert_allclose(found[0], whole[0], atol=1e-4)
    np.testing.assert_allclose(found[1, 7:], whole[1, 7:], atol=1e-4)
    alone = run(model if not laid_out else gpt(patterns), ids()[1:, 7:])
    np.testing.assert_allclose(whole[1, 7:], alone[0], atol=1e-4)


@pytest.mark.parametrize("patterns", [BANDED, GLOBAL], ids=str)
def test_generation_is_greedy_by_the_whole(patterns):
    model, prompt = gpt(patterns), ids(length=7)
    greedy = generate(model, prompt, max_new_tokens=9, sampling=Sampling(temperature=0)).tokens
    text = np.concatenate([prompt, greedy], axis=1)
    np.testing.assert_array_equal(greedy, np.argmax(run(model, text)[:, 6:-1], axis=-1))
    one = beam_search(model, prompt, beams=3, max_new_tokens=9)
    for row, tokens in enumerate(one.tokens[:, 0]):
        text = np.concatenate([prompt[row], tokens])[None]
        scores = jax.nn.log_softmax(run(model, text))[0, 6:-1]
        np.testing.assert_allclose(one.scores[row, 0], np.mean(scores[np.arange(9), tokens]), atol=1e-4)


@pytest.mark.parametrize("patterns", [(), BANDED, GLOBAL], ids=str)
def test_packed_texts_are_the_separate_ones(patterns):
    model, texts = gpt(patterns), [ids(1, length, seed=length) for length in (5, 8, 3)]
    packed = np.concatenate([*texts, np.zeros((1, 4), int)], axis=1)
    segments = np.repeat([0, 1, 2, 3], [5, 8, 3, 4])[None]
    logits = run(model, packed, (np.arange(20) < 16).astype(int)[None], segment_ids=segments)
    separate = jnp.concatenate([run(model, text) for text in texts], axis=1)
    np.testing.assert_allclose(logits[:, :16], separate, atol=1e-5)


def test_packed_texts_of_an_encoder():
    config = BertConfig(vocab_size=40, max_length=30, patterns=("local(2) | global(1)", "full"), **SIZES)
    model = jax.jit(lambda: Bert(config, rngs=nnx.Rngs(0)))()
    hidden = jax.jit(lambda *args, **named: model(*args, **named).hidden)
    texts = [ids(1, length, seed=length) for length in (5, 8, 3)]
    packed = hidden(np.concatenate(texts, axis=1), segment_ids=np.repeat([0, 1, 2], [5, 8, 3])[None])
    np.testing.assert_allclose(packed, jnp.concatenate([hidden(text) for text in texts], axis=1), atol=1e-5)
    padded = hidden(np.pad(texts[0], ((0, 0), (6, 0))), np.repeat([[0, 1]], [6, 5], axis=1))
    np.testing.assert_allclose(padded[:, 6:], hidden(texts[0]), atol=1e-5)


def test_images_and_translations_take_them():
    config = ViTConfig(image_size=16, patch_size=4, patterns=("local(4) | global(1)",), **SIZES)
    weights = ViT(config, rngs=nnx.Rngs(0))(jnp.ones((1, 16, 16, 3)), capture=["attention_weights"]).attention_weights
    allowed = np.asarray((nn.Local(4) | nn.Global(1)).mask(17, 17))
    assert ((np.asarray(weights) > 0) == allowed).all()
    config = EncoderDecoderConfig(vocab_size=40, pad_id=0, patterns=("local(2)",), decoder_patterns=BANDED, **SIZES)
    model = Seq2SeqLanguageModel(EncoderDecoder(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    source, target = ids(), ids(length=12, seed=1)
    whole = model(source, decoder_input_ids=target).logits
    conditioned = jax.jit(lambda model: nn.unstack(model).condition(source))(model)
    output = conditioned(target, cache=conditioned.init_cache(2, 12))
    np.testing.assert_allclose(output.logits, whole, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(GPTConfig, patterns=("local(3)",)), "patterns holds 'local(3)', which lets a decoder look ahead"),
        (partial(GPTConfig, patterns=BANDED, depth=3), "patterns holds 2 patterns, which do not divide the depth of 3"),
        (partial(GPTConfig, patterns=("causal & global(1025)",)), "place 1024 is outside of a sequence of 1024"),
        (partial(BertConfig, patterns=("local(0)",)), "patterns: local(window=0): window must be a whole number"),
        (partial(EncoderDecoderConfig, decoder_patterns=("causal &",)), "decoder_patterns: 'causal &' is no attention"),
        (partial(EncoderDecoderConfig, max_length=None, patterns=("random(1, 8)",)), "need patterns of any length"),
        (partial(BertConfig, patterns=("local(3, dilation=512)",)), "a query would see nothing but itself"),
        (partial(BertConfig, patterns=("locl(3)",)), "'locl(3)' is no attention pattern"),
        (partial(EncoderDecoderConfig, decoder_patterns=("full",)), "decoder_patterns holds 'full', which lets"),
        (partial(ViTConfig, patterns=("global(198)",)), "outside of a sequence of 197"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(ValueError) as error:
        make()
    assert said in str(error.value)


def test_operations_follow_what_is_seen():
    config = GPTConfig(patterns=("causal & local(63)",))
    dense, banded = GPTConfig().flops_per_token(1024), config.flops_per_token(1024)
    assert dense - banded == pytest.approx(12 * 12 * 768 * (1024 - 64), rel=0.01)
    full = EncoderDecoderConfig(vocab_size=100).flops_per_example(1024)
    both = dict(patterns=("local(31)",), decoder_patterns=("causal & local(63)",))
    saved = 12 * 512 * 1024 * 6 * ((1024 - 63) + (1024 - 64))
    assert full - EncoderDecoderConfig(vocab_size=100, **both).flops_per_example(1024) == pytest.approx(saved, rel=0.01)


def test_a_training_from_a_checkpoint_takes_the_patterns_it_is_given():
    checkpoint = BertConfig.tiny(patterns=("local(2)",))
    assert checkpoint.with_run_fields(BertConfig.tiny()).patterns == ("local(2)",)
    wanted = BertConfig.tiny(patterns=("local(4) | global(600)",), max_length=1024, resize_positions=True)
    assert checkpoint.with_run_fields(wanted) == wanted
    with pytest.raises(ValueError, match=r"patterns: global\(tokens=600\): place 599 is outside of a sequence of 512"):
        checkpoint.with_run_fields(dataclasses.replace(wanted, resize_positions=False))
    translation = EncoderDecoderConfig(decoder_patterns=("causal & local(3)",))
    assert EncoderDecoderConfig().with_run_fields(translation).decoder_patterns == translation.decoder_patterns
