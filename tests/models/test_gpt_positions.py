"""Kinds of positions of a GPT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax import nn
from transformers_jax.generation import Sampling, generate
from transformers_jax.models import GPT, GPTConfig, LanguageModel

KINDS = ["sinusoidal", "rotary", "relative"]


def build(positions, **changes):
    sizes = dict(vocab_size=40, max_length=64, dim=32, depth=2, heads=4, init_std=0.3)
    config = GPTConfig(positions=positions, **sizes | changes)
    return jax.jit(lambda: LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))()


def ids(length=20, batch=2):
    return jnp.asarray(np.random.default_rng(0).integers(40, size=(batch, length)))


run = jax.jit(lambda model, *args, **named: model(*args, **named))


def test_rotary_turns_each_plane_by_its_angle():
    """Against complex numbers: place i and place i + half are one of them, times exp(i * position * frequency)."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 10))
    positions = np.array([[0, 1, 2, 7, 400], [3, 3, 1, 0, 9]])
    turned = nn.Rotary(base=50.0, share=0.8)(jnp.asarray(x, jnp.float32), jnp.asarray(positions))
    planes = x[..., :4] + 1j * x[..., 4:8]
    angles = positions[:, :, None, None] * 50.0 ** (-np.arange(4) / 4)
    planes = planes * np.exp(1j * angles)
    np.testing.assert_allclose(turned, np.concatenate([planes.real, planes.imag, x[..., 8:]], axis=-1), atol=1e-4)
    np.testing.assert_array_equal(nn.Rotary()(jnp.ones((1, 2, 1, 4)), jnp.zeros((1, 2), int)), 1.0)


@pytest.mark.parametrize("positions", ["learned", *KINDS])
def test_order_counts_and_padding_does_not(positions):
    model = build(positions)
    whole = run(model, ids()).logits
    turned = run(model, ids()[:, ::-1]).logits[:, ::-1]
    assert np.abs(whole - turned)[:, 5:-5].max() > 0.1
    mask = jnp.ones((2, 20), int).at[1, :6].set(0)
    padded = run(model, ids(), mask).logits
    np.testing.assert_allclose(padded[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(padded[1, 6:], run(model, ids()[1:, 6:]).logits[0], atol=1e-5)


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("patterns", [(), ("causal & local(3)", "causal")])
def test_generation_continues_as_the_whole(positions, patterns):
    model, prompt = build(positions, patterns=patterns), ids(length=7)
    greedy = generate(model, prompt, max_new_tokens=6, sampling=Sampling(temperature=0)).tokens
    text = jnp.concatenate([prompt, greedy], axis=1)
    np.testing.assert_array_equal(np.argmax(run(model, text).logits[:, 6:-1], axis=-1), greedy)


@pytest.mark.parametrize("positions", KINDS)
def test_they_go_on_beyond_the_length_of_training(positions):
    model = build(positions)
    assert np.isfinite(run(model, ids(length=100)).logits).all()
    assert all(leaf.shape != (64, 32) for leaf in jax.tree.leaves(model))  # no table
    with pytest.raises(ValueError, match="100 positions are needed but the table has 64"):
        build("learned")(ids(length=100))


def test_shifted_rotary_positions_change_nothing():
    model = build("rotary")
    one, other = (run(model, ids(), positions=jnp.arange(20)[None].repeat(2, 0) + shift).logits for shift in (0, 300))
    np.testing.assert_allclose(one, other, atol=1e-3)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"turn 19\.2 of the 64 numbers of a head"):
        GPTConfig(positions="rotary", rotary_share=0.3)
    with pytest.raises(ValueError, match="base=nan"):
        GPTConfig(positions="rotary", rotary_base=float("nan"))
    with pytest.raises(ValueError, match="leave no bucket for larger offsets"):
        GPTConfig(positions="relative", relative_buckets=8, relative_max_distance=4)


def test_a_table_ends_whatever_says_the_positions():
    model, text = build("learned"), jnp.asarray(ids(length=65))
    ones, places = jnp.ones_like(text), jnp.arange(65)[None].repeat(len(text), 0)
    for given in ({"attention_mask": ones}, {"segment_ids": ones}, {"positions": places}):
        with pytest.raises(ValueError, match="positions hold 64 but the model has 0 to 63"):
            model(text, **given)
    assert np.isfinite(model(text, attention_mask=ones.at[:, 0].set(0)).logits[:, 1:]).all()
