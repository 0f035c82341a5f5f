"""mixup and CutMix: what is mixed with what, in which shares, and that pixels and targets agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

from transformers_jax.tasks.mixing import mix_images
from transformers_jax.training.mesh import MeshConfig, make_mesh

MIXUP, CUTMIX = {"mixup": 0.4, "cutmix": 0.0}, {"mixup": 0.0, "cutmix": 1.0}
BOTH = {"mixup": 0.4, "cutmix": 1.0}
KEY = jax.random.key(0)
mixed = jax.jit(mix_images, static_argnames=("mixup", "cutmix"))


def batch(seed=0, size=5):
    rng = np.random.default_rng(seed)
    pixels = rng.normal(size=(size, 13, 18, 3)).astype(np.float32)
    return jnp.asarray(pixels), jnp.asarray(rng.dirichlet(np.ones(6), size).astype(np.float32))


def own_shares(count, **options):
    """The share of its own target that picture 1 keeps, for many keys; the targets are one-hot."""
    pixels, targets = jnp.zeros((2, 32, 32, 1)), jnp.eye(2)
    keys = jax.random.split(jax.random.key(0), count)
    many = jax.jit(jax.vmap(lambda key: mix_images(pixels, targets, key, **options)[1][1, 1]))
    return np.asarray(many(keys))


def test_mixup_is_the_weighted_mean_with_the_picture_before():
    pixels, targets = batch(1)
    for seed in range(5):
        got, wanted = mixed(pixels, targets, jax.random.key(seed), **MIXUP)
        before, targets_before = np.roll(pixels, 1, axis=0), np.roll(targets, 1, axis=0)
        share = np.vdot(wanted - targets_before, targets - targets_before) / np.sum((targets - targets_before) ** 2)
        assert 0 <= share <= 1
        np.testing.assert_allclose(got, share * pixels + (1 - share) * before, atol=1e-5)
        np.testing.assert_allclose(wanted, share * targets + (1 - share) * targets_before, atol=1e-6)
        np.testing.assert_allclose(wanted.sum(-1), 1, atol=1e-6)
        np.testing.assert_allclose(got.sum(), pixels.sum(), atol=1e-3)  # each picture is given away as it is kept


def test_cutmix_replaces_a_box_and_the_targets_say_how_much_of_the_pixels():
    pixels, targets = batch(2)
    before, targets_before = np.roll(pixels, 1, axis=0), np.roll(targets, 1, axis=0)
    shares = []
    for seed in range(30):
        got, wanted = mixed(pixels, targets, jax.random.key(seed), **CUTMIX)
        own = np.asarray(got) == np.asarray(pixels)
        np.testing.assert_array_equal(np.where(own, pixels, before), got)
        outside = own.all((0, 3))
        assert (own == outside[None, :, :, None]).all()  # the same box in all pictures and channels
        rows, columns = np.flatnonzero(~outside.all(1)), np.flatnonzero(~outside.all(0))
        if len(rows):
            assert not outside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].any()  # whole
        share = outside.mean()
        np.testing.assert_allclose(wanted, share * targets + (1 - share) * targets_before, atol=1e-6)
        shares.append(share)
    assert len(set(shares)) > 20


def test_shares_follow_the_beta_distribution():
    assert stats.kstest(own_shares(3000, mixup=0.4), stats.beta(0.4, 0.4).cdf).pvalue > 1e-3


def test_boxes_are_those_of_the_paper():
    """Side lengths floor(side * sqrt(1 - share)), twice its half around a centre anywhere, cut off at the borders; the
    paper's own procedure in NumPy gives the same distribution of shares."""
    rng = np.random.default_rng(0)
    expected = []
    for _ in range(3000):
        side = int(32 * np.sqrt(1 - rng.beta(1.0, 1.0)))
        x, y = rng.integers(32, size=2)
        left, right = np.clip([x - side // 2, x + side // 2], 0, 32)
        top, bottom = np.clip([y - side // 2, y + side // 2], 0, 32)
        expected.append(1 - (right - left) * (bottom - top) / 32**2)
    assert stats.ks_2samp(own_shares(3000, cutmix=1.0), np.array(expected)).pvalue > 1e-3


def test_with_both_each_is_drawn_half_of_the_time():
    pixels, targets = jnp.arange(4.0).reshape(4, 1, 1, 1) * jnp.ones((4, 16, 16, 1)), jnp.eye(4)
    keys = jax.random.split(jax.random.key(5), 2000)
    got, _ = jax.jit(jax.vmap(lambda key: mix_images(pixels, targets, key, mixup=1.0, cutmix=1.0)))(keys)
    whole = np.isin(np.asarray(got), np.arange(4)).all((1, 2, 3, 4))  # CutMix averages nothing
    assert stats.binomtest(int(whole.sum()), 2000, 0.5).pvalue > 1e-3


def test_the_key_decides():
    pixels, targets = batch()
    for options in (MIXUP, CUTMIX, BOTH):
        one, two, other = (mixed(pixels, targets, jax.random.key(seed), **options)[1] for seed in (3, 3, 4))
        np.testing.assert_array_equal(one, two)
        assert not np.array_equal(one, other)


def test_off_is_the_identity():
    pixels, targets = batch()
    got, wanted = mixed(pixels, targets, jax.random.key(1), mixup=0.0, cutmix=0.0)
    np.testing.assert_array_equal(got, pixels)
    np.testing.assert_array_equal(wanted, targets)


def test_a_single_picture_stays_as_it_is():
    pixels, targets = batch(size=1)
    for seed in range(6):
        got, wanted = mixed(pixels, targets, jax.random.key(seed), **BOTH)
        np.testing.assert_allclose(got, pixels, atol=1e-6)
        np.testing.assert_allclose(wanted, targets, atol=1e-6)


def test_gradients_reach_every_pixel_once():
    """The sum over all pictures has gradient 1 everywhere: what is taken from one pixel is given to another."""
    pixels, targets = batch()
    gradient = jax.jit(jax.grad(lambda pixels, key: mix_images(pixels, targets, key, **BOTH)[0].sum()))
    for seed in range(6):
        np.testing.assert_allclose(gradient(pixels, jax.random.key(seed)), 1, atol=1e-6)


def test_eight_devices_mix_as_one():
    pixels, targets = batch(size=8)
    rows = NamedSharding(make_mesh(MeshConfig(data=8)), PartitionSpec("data"))
    for seed in range(4):
        alone = mixed(pixels, targets, jax.random.key(seed), **BOTH)
        spread = mixed(*jax.device_put((pixels, targets), rows), jax.random.key(seed), **BOTH)
        for one, other in zip(alone, spread, strict=True):
            np.testing.assert_allclose(other, one, atol=1e-6)


def test_bfloat16_stays():
    pixels, targets = batch()
    got, wanted = jax.eval_shape(lambda *args: mix_images(*args, **BOTH), pixels.astype(jnp.bfloat16), targets, KEY)
    assert got.dtype == jnp.bfloat16 and wanted.dtype == jnp.float32


def test_negative_settings_are_refused():
    pixels, targets = batch()
    for name in ("mixup", "cutmix"):
        with pytest.raises(ValueError, match=f"{name}=-1.0 must not be negative; 0 turns it off"):
            mix_images(pixels, targets, KEY, **{name: -1.0})
