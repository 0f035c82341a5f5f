"""How much longer does a forward pass take on images of twice the side? Windows and channels cost as much for every
place of the map: four times. Attention of all patches to all costs sixteen times, and has the rest to hide behind.

    python benchmarks/image_size.py

Swin and DaViT (tiny) at `--side` and twice that, in turns, and beside them a narrow ViT with as small patches,
at half of that and `--side`: with four times as many, its scores would take gigabytes. To reach: at most 5 times for
Swin and DaViT.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from side_by_side import alternate, machine, warn_if_busy

from transformers_jax.models import DaViTConfig, SwinConfig, ViTConfig

BAR = 5.0
CONFIGS = {
    "Swin": SwinConfig.tiny(),
    "DaViT": DaViTConfig.tiny(),
    "ViT": ViTConfig(patch_size=4, dim=96, depth=4, heads=3, pooling="mean", class_token=False, positions="sinusoidal"),
}


def forward(config: SwinConfig | DaViTConfig | ViTConfig, side: int, batch: int) -> Callable[[], float]:
    """What runs the model once on images of `side`, and gives the seconds."""
    model = config.build(rngs=nnx.Rngs(0))
    run, pixels = jax.jit(lambda model, pixels: model(pixels).pooled), jnp.zeros((batch, side, side, config.channels))
    jax.block_until_ready(run(model, pixels))

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(model, pixels))
        return time.perf_counter() - start

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    about, side = machine(), options.side
    sides = {name: (side // 2, side) if name == "ViT" else (side, 2 * side) for name in CONFIGS}
    print(f"jax {jax.__version__}, {about['cpu']}, {about['cores']} cores, load average {about['load']:.2f}")
    warn_if_busy(about["load"])
    runs = {
        f"{name} {side}": forward(config, side, options.batch)
        for name, config in CONFIGS.items()
        for side in sides[name]
    }
    seconds = alternate(runs, rounds=options.rounds)
    for name in CONFIGS:
        small, large = (statistics.median(seconds[f"{name} {side}"]) for side in sides[name])
        bar = "" if name == "ViT" else f"; at most {BAR}: {'reached' if large / small <= BAR else 'NOT reached'}"
        print(f"{name:6} {small * 1e3:8.1f} ms at {sides[name][0]}, {large * 1e3:8.1f} ms at {sides[name][1]}: "
              f"{large / small:5.2f} times{bar}")  # fmt: skip


if __name__ == "__main__":
    main()
