"""Speed on one NVIDIA GPU, and whether fused attention takes the masks it must. About six minutes.

    python benchmarks/gpu.py --torch-python ~/venvs/torch-cuda/bin/python

In bfloat16, beside PyTorch where its interpreter has it with CUDA: GPT-2 124M, training, forward and generation;
BERT-base and ViT-B/16, training and forward. For training steps also the rate, and the share of the GPU's peak that is
put to use. Without a GPU it says so and ends with 0; `--try-on-cpu` runs everything there with tiny sizes, only to see
that it runs.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU's memory

import jax
import jax.numpy as jnp
from jax import Array
from side_by_side import Contender, Row, alternate, measure, report

from transformers_jax.models import BertConfig, GPTConfig, ViTConfig
from transformers_jax.nn import Causal, Full, attend, choose_implementation

PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "L4": 121, "4090": 165, "L40S": 362}
"""Dense bfloat16 peaks by a part of the device's name, from NVIDIA's data sheets."""
GPT2 = dict(vocab_size=50304, max_length=1024, dim=768, depth=12, heads=12)
BASE = dict(dim=768, depth=12, heads=12)
TINY = dict(vocab_size=96, max_length=64, dim=32, depth=2, heads=2)
TINY_BASE = dict(dim=32, depth=2, heads=2)
TOLERANCE = 2e-2
MFU_BAR = 0.45


def rows(
    model: dict[str, int], batch: int, length: int, new: int, base: dict[str, int], texts: int, images: int
) -> tuple[Row, ...]:
    """`texts` of half the length, and `images` of 224 x 224, go to BERT and ViT of the sizes `base`."""
    prompt = length // 2 - new // 2
    text = dict(batch=texts, length=length // 2, model=base)
    image = dict(batch=images, model=base)
    return (
        Row("gpu_train", f"training step, bfloat16, {batch} x {length}", {"torch": 1.0},
            dict(batch=batch, length=length, model=model)),
        Row("gpu_forward", f"forward, bfloat16, {batch} x {length}", {"torch": 1.0},
            dict(batch=batch, length=length, model=model)),
        Row("gpu_generate_1", f"generation, 1 x ({prompt} + {new}), greedy", {"torch": 1.0},
            dict(batch=1, prompt=prompt, new=new, model=model)),
        Row("gpu_generate_64", f"generation, 64 x ({prompt} + {new}), greedy", {"torch": 1.0},
            dict(batch=64, prompt=prompt, new=new, model=model)),
        Row("gpu_bert_train", f"BERT masked-LM training step, bfloat16, {texts} x {length // 2}; ours reads out the "
            "masked tokens only", {"torch": 1.0}, text),
        Row("gpu_bert_forward", f"BERT masked-LM forward, bfloat16, {texts} x {length // 2}, all logits",
            {"torch": 1.0}, text),
        Row("gpu_vit_train", f"ViT training step, bfloat16, {images} x 224 x 224", {"torch": 1.0}, image),
        Row("gpu_vit_forward", f"ViT forward, bfloat16, {images} x 224 x 224", {"torch": 1.0}, image),
    )  # fmt: skip


def use_of_peak(row: Row, seconds: float, peak_tflops: float | None) -> str:
    """Tokens or images a second and, where the GPU's peak is known, MFU (for BERT that of its layers)."""
    size = row.size
    kind = {"gpu_train": GPTConfig, "gpu_bert_train": BertConfig, "gpu_vit_train": ViTConfig}[row.name]
    items = size["batch"] * size.get("length", 1)
    config, rate = kind(**size["model"]), items / seconds
    line = f"{rate:,.0f} {'tokens' if 'length' in size else 'images'}/s"
    if peak_tflops:
        flops = config.flops_per_token(size["length"]) if "length" in size else config.flops_per_example()
        mfu = rate * flops / (peak_tflops * 1e12)
        line += f", MFU {mfu:.1%}"
        if row.name == "gpu_train":
            line += f" (bar {MFU_BAR:.0%} {'reached' if mfu >= MFU_BAR else 'NOT reached'})"
    return line


def attention_case(
    *, batch: int, length: int, heads: int, head_dim: int, dtype: str = "bfloat16", padded: bool = False,
    biased: bool = False, causal: bool = False
) -> tuple[str, float]:  # fmt: skip
    """How `attend` chose to compute it, and its largest difference from the plain path in float32.

    Over outputs and all gradients, each as a share of 1 + |the right value|.
    """
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (batch, length, heads, head_dim)
    query, key, value = (jax.random.normal(k, shape).astype(dtype) for k in keys[:3])
    weight = jax.random.normal(keys[3], shape)
    bias = jax.random.normal(keys[4], (1, heads, length, length)).astype(dtype) if biased else None
    lengths = jnp.arange(batch) % length + 1
    mask = (jnp.arange(length) < lengths[:, None])[:, None, None, :] if padded else None
    pattern = Causal() if causal else Full()

    def loss(arguments: tuple[Array | None, ...], implementation: str | None) -> tuple[Array, Array]:
        query, key, value, bias = arguments
        output = attend(query, key, value, bias=bias, mask=mask, pattern=pattern, implementation=implementation)
        return jnp.sum(output.astype(jnp.float32) * weight) / length, output

    def results(arguments: tuple[Array | None, ...], implementation: str | None) -> list[Array]:
        compute = jax.jit(jax.value_and_grad(lambda arguments: loss(arguments, implementation), has_aux=True))
        (_, output), gradients = compute(arguments)
        return [x.astype(jnp.float32) for x in jax.tree.leaves((output, gradients))]

    arguments = (query, key, value, bias)
    exact = tuple(None if x is None else x.astype(jnp.float32) for x in arguments)
    with jax.default_matmul_precision("highest"):
        right = results(exact, "plain")
    pairs = zip(results(arguments, None), right, strict=True)
    worst = max(float(jnp.max(jnp.abs(a - b) / (1 + jnp.abs(b)))) for a, b in pairs)
    return choose_implementation(query, key, value, bias=bias), worst


CASES = {
    "padding mask (batch, 1, 1, keys)": dict(batch=4, length=32, heads=4, head_dim=16, padded=True),
    "causal, padding mask": dict(batch=4, length=32, heads=4, head_dim=16, padded=True, causal=True),
    "learned bias (1, heads, q, k), batch 16": dict(batch=16, length=32, heads=4, head_dim=16, biased=True),
    "head size 20": dict(batch=4, length=32, heads=4, head_dim=20, padded=True),
    "length 33": dict(batch=4, length=33, heads=4, head_dim=16, padded=True),
    "float32": dict(batch=4, length=32, heads=4, head_dim=16, padded=True, dtype="float32"),
    "GPT-2's heads, causal": dict(batch=2, length=256, heads=12, head_dim=64, causal=True),
}


def check_attention() -> bool:
    """Print every case; False if one is wrong, or if what cannot be served is not refused."""
    print(f"\nattention as chosen against the plain path in float32, at most {TOLERANCE:g}:")
    good = True
    for name, case in CASES.items():
        chosen, worst = attention_case(**case)
        good &= worst <= TOLERANCE
        print(f"  {name:42} {chosen:6} {worst:8.1e} {'right' if worst <= TOLERANCE else 'WRONG'}")
    x = jnp.zeros((1, 32, 4, 20), jnp.bfloat16)
    try:
        attend(x, x, x, implementation="cudnn")
    except ValueError as error:
        print(f"  cuDNN forced on head size 20 is refused: {error}")
    else:
        good = False
        print("  WRONG: cuDNN forced on head size 20 is not refused")
    return good


def time_attention(batch: int, length: int, heads: int, head_dim: int, rounds: int, iterations: int) -> None:
    """Causal attention, forward and backward, fused against plain."""
    x = jax.random.normal(jax.random.key(0), (batch, length, heads, head_dim), jnp.bfloat16)

    def timed(implementation: str) -> Callable[[], float]:
        gradient = jax.jit(
            jax.grad(lambda x: attend(x, x, x, pattern=Causal(), implementation=implementation).astype(float).sum())
        )
        gradient(x).block_until_ready()

        def run() -> float:
            begin = time.perf_counter()
            result = [gradient(x) for _ in range(iterations)][-1]
            result.block_until_ready()
            return (time.perf_counter() - begin) / iterations

        return run

    kinds = ("plain", "cudnn") if jax.default_backend() == "gpu" else ("plain",)
    seconds = alternate({kind: timed(kind) for kind in kinds}, rounds=rounds)
    print(f"\ncausal attention and its gradient, {batch} x {length}, {heads} heads of {head_dim}:")
    for kind, times in seconds.items():
        print(f"  {kind:6} {statistics.median(times) * 1e3:8.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="sequences of 1,024 tokens in a training step")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter with torch (CUDA), transformers 5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, help="of the GPU in bfloat16, if its name is not known here")
    parser.add_argument("--try-on-cpu", action="store_true", help="run on the CPU with tiny sizes")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()

    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.try_on_cpu:
        print("no GPU")
        return
    name = jax.devices()[0].device_kind
    peak = options.peak_tflops or next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
    print(f"{name}, jax {jax.__version__}; ratio = PyTorch's median time / ours")
    good = check_attention()
    time_attention(*((16, 1024, 12, 64, 5, 20) if on_gpu else (2, 32, 2, 16, 2, 2)))

    sizes = (GPT2, options.batch, 1024, 128, BASE, 64, 128) if on_gpu else (TINY, 2, 32, 8, TINY_BASE, 2, 2)
    contenders = {
        "ours": Contender("work_ours_gpu", sys.executable),
        "torch": Contender("work_torch_gpu", options.torch_python),
    }
    data = {"device": name, "rows": {}}
    for row in rows(*sizes):
        seconds = 1.0 if on_gpu else 0.01
        results = measure(row, contenders, rounds=options.rounds, seconds=seconds, pause=0.1, threads=2)
        data["rows"][row.name] = report(row, results)
        for contender, result in results.items():
            if row.name.endswith("train") and result.seconds:
                print(f"  {contender:14} {use_of_peak(row, result.median, peak)}")
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if not good:
        raise SystemExit("attention is wrong: see above")


if __name__ == "__main__":
    main()
