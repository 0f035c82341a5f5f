"""Time and memory of attention, forward and backward, against the length of the sequence.

    python benchmarks/attention_length.py                                    # 512 to 16,384, every pattern
    python benchmarks/attention_length.py --plot docs/attention_length.png --json lengths.json

One row of `--heads` heads of `--head-dim`. "dense" holds all scores, under the pattern's mask; "blocks" is what
`attend` does of itself with long sequences. Memory is what XLA sets aside for the compiled function beside its
arguments and results.

To reach, with a window of 256 and its past: from 4,096 to 16,384 at most 4.6 times the time and 4.4 times the memory;
at 4,096 three times as fast as dense. And with all of the past at 8,192: a quarter of the memory of dense at no more
than 1.3 times the time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from side_by_side import alternate, machine, warn_if_busy

from transformers_jax.nn import attend, parse_pattern

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DENSE_UP_TO = 8192
WINDOW, PAST = "causal & local(256)", "causal"
PATTERNS = (
    PAST,
    WINDOW,
    "local(256)",
    "local(64, dilation=4)",
    "local(128) | global(4)",
    "causal & strided(64)",
    "local(128) | global(4) | random(3, 16384, block=128)",
)
DENSE = (PAST, WINDOW)


def measure(name: str, way: str, length: int, heads: int, head_dim: int) -> tuple[Callable[[], float], int]:
    """What computes it once and gives the seconds; and bytes."""
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, (1, length, heads, head_dim)) for key in keys]
    implementation = "plain" if way == "dense" else "blockwise"

    def loss(query: Any, key: Any, value: Any) -> Any:
        return jnp.sum(attend(query, key, value, pattern=parse_pattern(name), implementation=implementation) ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        return time.perf_counter() - start

    return once, compiled.memory_analysis().temp_size_in_bytes


def check(title: str, value: float, bar: float, *, at_most: bool = True) -> None:
    reached = value <= bar if at_most else value >= bar
    said = "at most" if at_most else "at least"
    print(f"{title}: {value:.2f}; {said} {bar}: {'reached' if reached else 'NOT reached'}")


def plot(results: dict[tuple[str, str], dict[int, tuple[float, int]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (of_time, of_memory) = plt.subplots(1, 2, figsize=(12, 5))
    for (name, way), values in results.items():
        lengths, style = sorted(values), "--" if way == "dense" else "-"
        for axis, part, scale in ((of_time, 0, 1e3), (of_memory, 1, 2**-20)):
            axis.plot(
                lengths, [values[n][part] * scale for n in lengths], style, marker="o", ms=3, label=f"{name} ({way})"
            )
    for axis, title in ((of_time, "milliseconds"), (of_memory, "MiB")):
        axis.set(xscale="log", yscale="log", xlabel="length", title=title)
        axis.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
        axis.grid(alpha=0.3)
    of_memory.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    about = machine()
    print(f"jax {jax.__version__}, {about['cpu']}, {about['cores']} cores, load average {about['load']:.2f}")
    warn_if_busy(about["load"])
    results: dict[tuple[str, str], dict[int, tuple[float, int]]] = {}
    for length in options.lengths:
        ways = [(name, "blocks") for name in options.patterns]
        ways += [(name, "dense") for name in options.patterns if name in DENSE and length <= DENSE_UP_TO]
        runs, sizes = {}, {}
        for name, way in ways:
            runs[f"{name} {way}"], sizes[name, way] = measure(name, way, length, options.heads, options.head_dim)
        seconds = alternate(runs, rounds=options.rounds)
        for name, way in ways:
            median = statistics.median(seconds[f"{name} {way}"])
            results.setdefault((name, way), {})[length] = median, sizes[name, way]
            print(f"{length:7,}  {name:55} {way:7} {median * 1e3:10.1f} ms {sizes[name, way] / 2**20:9.1f} MiB")
    report(results)
    if options.json is not None:
        rows = [
            {"pattern": name, "way": way, "length": length, "seconds": seconds, "bytes": size}
            for (name, way), values in results.items()
            for length, (seconds, size) in values.items()
        ]
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1))
    if options.plot is not None:
        plot(results, options.plot)


def report(results: dict[tuple[str, str], dict[int, tuple[float, int]]]) -> None:
    window, dense = results.get((WINDOW, "blocks"), {}), results.get((WINDOW, "dense"), {})
    if {4096, 16384} <= window.keys():
        check("window, time from 4,096 to 16,384", window[16384][0] / window[4096][0], 4.6)
        check("window, memory from 4,096 to 16,384", window[16384][1] / window[4096][1], 4.4)
    if 4096 in window and 4096 in dense:
        check("window at 4,096, speed against dense", dense[4096][0] / window[4096][0], 3, at_most=False)
    past, dense = results.get((PAST, "blocks"), {}), results.get((PAST, "dense"), {})
    if 8192 in past and 8192 in dense:
        check("all of the past at 8,192, memory of dense", past[8192][1] / dense[8192][1], 0.25)
        check("all of the past at 8,192, time of dense", past[8192][0] / dense[8192][0], 1.3)


if __name__ == "__main__":
    main()
