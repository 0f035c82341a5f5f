"""Speed on one NVIDIA GPU. (`gpu_attention.py` is the one for attention alone.)

    python benchmarks/gpu.py --torch-python ~/venvs/torch-cuda/bin/python

In bfloat16, beside PyTorch where its interpreter has it with CUDA: GPT-2 124M, training, forward and generation;
BERT-base and ViT-B/16, training and forward. For training steps also the rate, and the share of the GPU's peak that is
put to use. Without a GPU it says so and ends with 0; `--try-on-cpu` runs everything there with tiny sizes, only to see
that it runs.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU's memory

import jax
from side_by_side import Contender, Row, measure, report

from transformers_jax.models import BertConfig, GPTConfig, ViTConfig

PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "L4": 121, "4090": 165, "L40S": 362}
"""Dense bfloat16 peaks by a part of the device's name, from NVIDIA's data sheets."""
GPT2 = dict(vocab_size=50304, max_length=1024, dim=768, depth=12, heads=12)
BASE = dict(dim=768, depth=12, heads=12)
TINY = dict(vocab_size=96, max_length=64, dim=32, depth=2, heads=2)
TINY_BASE = dict(dim=32, depth=2, heads=2)
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


if __name__ == "__main__":
    main()
