"""A model that is not in the zoo, from the blocks: a Transformer that sorts sets of numbers.

    python examples/own_model.py               # about a minute on two CPU cores; sorts 98 of 100 unseen sets
    python examples/own_model.py --steps 200   # a shorter look

An encoder reads the numbers without positions, so their order cannot matter. Learned queries, one for each place of the
answer, then look at what it found by cross-attention (as in the Set Transformer, Lee et al. 2019, and DETR, Carion et
al. 2020): the i-th query answers "which number is the i-th smallest?". Sets have different sizes; a mask says which
numbers are there. Training is plain JAX and optax: a model is a pytree.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from transformers_jax.nn import LayerNorm, Stack, TokenEmbedding, TransformerLayer, normal_init

NUMBERS, PLACES = 20, 8  # sets of up to 8 numbers from 0 to 19, repetitions allowed


class SetSorter(nnx.Module):
    """Numbers (batch, n) int32 and mask (batch, n) bool to the logits (batch, places, numbers) of the sorted set."""

    def __init__(self, dim: int = 64, depth: int = 2, heads: int = 4, *, rngs: nnx.Rngs):
        self.embedding = TokenEmbedding(NUMBERS, dim, embedding_init=normal_init(0.5), rngs=rngs)
        self.queries = nnx.Param(normal_init(0.5)(rngs.params(), (PLACES, dim)))
        make_layer = partial(TransformerLayer, dim, heads, 4 * dim, kernel_init=normal_init(dim**-0.5))
        # A Stack holds all layers in one, with a leading depth axis on each parameter.
        self.encoder = Stack(make_layer, depth, rngs=rngs)
        self.reader = make_layer(cross_attention=True, rngs=rngs)
        self.norm = LayerNorm(dim, rngs=rngs)

    def __call__(self, numbers: jax.Array, mask: jax.Array) -> jax.Array:
        mask = mask[:, None, None, :]  # (batch, heads, queries, keys): True = may look; axes of 1 stand for all

        def apply(layer, hidden, state, given):  # how the stack runs one layer; we have no cache and no per-layer input
            return layer(hidden, mask=mask).hidden, None, None

        hidden, _, _ = self.encoder(apply, self.embedding(numbers))
        queries = jnp.broadcast_to(self.queries[...], (numbers.shape[0], *self.queries.shape))
        answers = self.reader(queries, context=hidden, context_mask=mask).hidden
        return self.embedding.read_out(self.norm(answers))  # the same vectors that embed the numbers score them


def make_batch(key: jax.Array, size: int) -> dict[str, jax.Array]:
    """`size` random sets: `numbers`, their `mask`, and as `target` the sorted numbers (where `mask` says so)."""
    number_key, count_key = jax.random.split(key)
    numbers = jax.random.randint(number_key, (size, PLACES), 0, NUMBERS)
    mask = jnp.arange(PLACES) < jax.random.randint(count_key, (size, 1), 2, PLACES + 1)
    target = jnp.sort(jnp.where(mask, numbers, NUMBERS), axis=-1)  # what is not there goes to the end
    return dict(numbers=numbers, mask=mask, target=jnp.where(mask, target, 0))


def loss_fn(model: SetSorter, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["numbers"], batch["mask"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


@jax.jit
def accuracy(model: SetSorter, batch: dict[str, jax.Array]) -> jax.Array:
    """The share of sets with every place right."""
    right = jnp.argmax(model(batch["numbers"], batch["mask"]), axis=-1) == batch["target"]
    return jnp.mean(jnp.all(right | ~batch["mask"], axis=-1))


def train(steps: int, batch_size: int, learning_rate: float, seed: int) -> SetSorter:
    model = SetSorter(rngs=nnx.Rngs(seed))
    print(f"{sum(x.size for x in jax.tree.leaves(model)):,} parameters")
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(100, steps // 4), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(model, opt_state, key):
        loss, gradients = jax.value_and_grad(loss_fn)(model, make_batch(key, batch_size))
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(model, updates), opt_state, loss

    opt_state, key, start = optimizer.init(model), jax.random.key(seed), time.perf_counter()
    for i in range(1, steps + 1):
        model, opt_state, loss = step(model, opt_state, jax.random.fold_in(key, i))
        if i % 100 == 0 or i == steps:
            print(f"step {i:5d}  loss {loss:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Transformer that sorts sets of numbers.")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer updates")
    parser.add_argument("--batch-size", type=int, default=128, help="sets per update")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = train(options.steps, options.batch_size, options.learning_rate, options.seed)
    unseen = make_batch(jax.random.key(options.seed + 1), 2000)
    print(f"sets sorted without a mistake: {100 * accuracy(model, unseen):.1f} %")

    row = {name: x[:1] for name, x in make_batch(jax.random.key(options.seed + 2), 1).items()}
    count = int(row["mask"].sum())
    answer = jnp.argmax(model(row["numbers"], row["mask"]), axis=-1)
    print(f"{row['numbers'][0, :count].tolist()} -> {answer[0, :count].tolist()}")


if __name__ == "__main__":
    main()
