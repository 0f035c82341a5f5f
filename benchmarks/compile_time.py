"""Does the time to trace and compile a training step grow with depth? Layers are stacked and scanned, so it should not.

    python benchmarks/compile_time.py

The step of a small GPT (the width hardly matters) with 4, 12 and 48 layers, in turns, without the cache of compiled
programs on disk. To reach: 48 layers at most 1.3 times the time of 4.
"""

import argparse
import statistics
import time

import jax
import numpy as np
from flax import nnx
from side_by_side import alternate, machine, warn_if_busy

from transformers_jax.models import GPT, GPTConfig, LanguageModel
from transformers_jax.nn import stacked_mask
from transformers_jax.tasks import LanguageModeling
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer
from transformers_jax.training.state import TrainState
from transformers_jax.training.step import make_train_step

BAR = 1.3
PARTS = ("trace", "lower", "compile")


def measure(depth: int) -> tuple[float, float, float]:
    """Seconds to trace, to lower and to compile."""
    config = GPTConfig(vocab_size=256, max_length=128, dim=256, depth=depth, heads=4)

    def build() -> LanguageModel:
        return LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))

    model = jax.eval_shape(build)
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1), 100, model, stacked=stacked_mask(model))
    state = jax.eval_shape(lambda: TrainState.create(build(), optimizer))
    ids = np.zeros((8, 128), np.int32)
    jax.clear_caches()
    times = [time.perf_counter()]
    step = jax.jit(make_train_step(LanguageModeling().loss, optimizer), donate_argnums=0)
    traced = step.trace(state, {"input_ids": ids, "labels": ids})
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 12, 48])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    jax.config.update("jax_enable_compilation_cache", False)
    about = machine()
    print(f"jax {jax.__version__}, {about['cpu']}, {about['cores']} cores, load average {about['load']:.2f}")
    warn_if_busy(about["load"])
    measure(options.depths[0])  # the first one loads libraries
    seconds = alternate(
        {str(depth): lambda depth=depth: measure(depth) for depth in options.depths}, rounds=options.rounds
    )
    medians = {
        depth: [statistics.median(part) for part in zip(*rounds, strict=True)] for depth, rounds in seconds.items()
    }
    first = sum(medians[str(options.depths[0])])
    print(f"{'layers':>6} " + " ".join(f"{part:>8}" for part in PARTS) + "      sum  against the first")
    for depth, parts in medians.items():
        print(
            f"{depth:>6} " + " ".join(f"{part:7.2f}s" for part in [*parts, sum(parts)]) + f"  {sum(parts) / first:5.2f}"
        )
    ratio = sum(medians[str(options.depths[-1])]) / first
    print(f"{options.depths[-1]} layers take {ratio:.2f} times as long as {options.depths[0]}; "
          f"at most {BAR}: {'reached' if ratio <= BAR else 'NOT reached'}")  # fmt: skip


if __name__ == "__main__":
    main()
