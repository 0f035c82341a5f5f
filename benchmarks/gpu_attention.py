"""Is attention right and fast on one NVIDIA GPU: as `attend` chooses to compute it, against the plain computation in
float32; values, gradients, time.

    python benchmarks/gpu_attention.py

Without a GPU it says so and ends with 0; `--try-on-cpu` runs everything there with tiny sizes, only to see that it
runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from side_by_side import alternate

from transformers_jax.nn import Causal, Full, Global, Local, Pattern, attend, choose_implementation

FULL = Full()
TOLERANCE = 2e-2
"""Of values and gradients in 16 bits, as a share of 1 + |the right value|."""


def compare(
    *, batch: int = 4, length: int = 32, heads: int = 4, head_dim: int = 16, dtype: str = "bfloat16",
    padded: bool = False, biased: bool = False, segments: int = 1, pattern: Pattern = FULL
) -> tuple[str, float]:  # fmt: skip
    """How `attend` chose to compute it, and its largest difference from the plain path in float32, over outputs and all
    gradients."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (batch, length, heads, head_dim)
    query, key, value = (jax.random.normal(k, shape).astype(dtype) for k in keys[:3])
    weight = jax.random.normal(keys[3], shape)
    bias = jax.random.normal(keys[4], (1, heads, length, length)).astype(dtype) if biased else None
    lengths = jnp.arange(batch) * length // batch + 1
    mask = (jnp.arange(length) < lengths[:, None])[:, None, None, :] if padded else None
    ids = jnp.broadcast_to(jnp.arange(length) * segments // length, (batch, length)) if segments > 1 else None
    seen: dict[str, Any] = dict(mask=mask, pattern=pattern)

    def results(arguments: tuple[Array | None, ...], implementation: str | None) -> list[Array]:
        def loss(arguments: tuple[Array | None, ...]) -> tuple[Array, Array]:
            *arrays, bias = arguments
            output = attend(*arrays, bias=bias, segment_ids=ids, implementation=implementation, **seen)
            return jnp.sum(output.astype(jnp.float32) * weight) / length, output

        (_, output), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)
        return [x.astype(jnp.float32) for x in jax.tree.leaves((output, gradients))]

    arguments = (query, key, value, bias)
    exact = tuple(None if x is None else x.astype(jnp.float32) for x in arguments)
    with jax.default_matmul_precision("highest"):
        right = results(exact, "plain")
    pairs = zip(results(arguments, None), right, strict=True)
    worst = max(float(jnp.max(jnp.abs(a - b) / (1 + jnp.abs(b)))) for a, b in pairs)
    return choose_implementation(query, key, value, bias=bias, **seen), worst


CASES: dict[str, dict[str, Any]] = {
    "padding mask (batch, 1, 1, keys)": dict(padded=True),
    "causal, padding mask": dict(padded=True, pattern=Causal()),
    "learned bias (1, heads, q, k), batch 16": dict(batch=16, biased=True),
    "head size 20": dict(head_dim=20, padded=True),
    "length 33": dict(length=33, padded=True),
    "float32": dict(padded=True, dtype="float32"),
    "GPT-2's heads, causal": dict(batch=2, length=256, heads=12, head_dim=64, pattern=Causal()),
    "packed texts, causal": dict(batch=2, length=256, segments=5, pattern=Causal()),
    "window of 64, short": dict(length=256, pattern=Local(64) & Causal()),
}
LONG: dict[str, dict[str, Any]] = {
    "window of 256 in 4,096": dict(batch=1, length=4096, head_dim=64, pattern=Local(256) & Causal()),
    "the same, padded": dict(batch=2, length=4096, head_dim=64, padded=True, pattern=Local(256) & Causal()),
    "window and global tokens in 4,096": dict(batch=1, length=4096, head_dim=64, pattern=Local(256) | Global(4)),
    "dilation of 4 in 4,096": dict(batch=1, length=4096, head_dim=64, pattern=Local(64, dilation=4) & Causal()),
}


def check(cases: dict[str, dict[str, Any]]) -> bool:
    """Print every case; False if one is wrong, or if what cannot be served is not refused."""
    print(f"attention as chosen against the plain path in float32, at most {TOLERANCE:g}:")
    good = True
    for name, case in cases.items():
        chosen, worst = compare(**case)
        good &= worst <= TOLERANCE
        print(f"  {name:42} {chosen:9} {worst:8.1e} {'right' if worst <= TOLERANCE else 'WRONG'}")
    x = jnp.zeros((1, 32, 4, 20), jnp.bfloat16)
    try:
        attend(x, x, x, implementation="cudnn")
    except ValueError as error:
        print(f"  cuDNN forced on head size 20 is refused: {error}")
    else:
        good = False
        print("  WRONG: cuDNN forced on head size 20 is not refused")
    return good


def compare_times(
    batch: int, length: int, pattern: Pattern, kinds: tuple[str, ...], *, heads: int, head_dim: int, iterations: int
) -> None:
    """Attention and its gradient, the ways there are side by side."""
    x = jax.random.normal(jax.random.key(0), (batch, length, heads, head_dim), jnp.bfloat16)

    def timed(implementation: Any) -> Callable[[], float]:
        gradient = jax.jit(
            jax.grad(lambda x: attend(x, x, x, pattern=pattern, implementation=implementation).astype(float).sum())
        )
        gradient(x).block_until_ready()

        def run() -> float:
            begin = time.perf_counter()
            result = [gradient(x) for _ in range(iterations)][-1]
            result.block_until_ready()
            return (time.perf_counter() - begin) / iterations

        return run

    seconds = alternate({kind: timed(kind) for kind in kinds}, rounds=5)
    print(f"\n{pattern} and its gradient, {batch} x {length:,}, {heads} heads of {head_dim}:")
    for kind, times in seconds.items():
        print(f"  {kind:9} {statistics.median(times) * 1e3:8.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try-on-cpu", action="store_true", help="run on the CPU with tiny sizes")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.try_on_cpu:
        print("no GPU")
        return
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    good = check(CASES | LONG if on_gpu else CASES)
    sizes: dict[str, int] = (
        dict(heads=12, head_dim=64, iterations=20) if on_gpu else dict(heads=2, head_dim=16, iterations=2)
    )
    fused = ("cudnn",) if on_gpu else ()
    for batch, length in ((16, 1024), (4, 4096), (1, 16384)) if on_gpu else ((2, 32),):
        dense = ("plain",) if length <= 4096 else ()
        compare_times(batch, length, Causal(), (*dense, "blockwise", *fused), **sizes)
        window = Local(256) & Causal()
        compare_times(batch, length, window, (*dense, "blockwise", *(fused if length <= 4096 else ())), **sizes)
    if not good:
        raise SystemExit("attention is wrong: see above")


if __name__ == "__main__":
    main()
