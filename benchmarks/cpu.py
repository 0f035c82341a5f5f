"""Speed on CPU, side by side with PyTorch and with the Flax models that transformers had until 4.57.

    python benchmarks/cpu.py                                        # all rows, PyTorch from this interpreter
    python benchmarks/cpu.py gpt_train gpt2_forward --flax-python ~/venvs/transformers457/bin/python
    python benchmarks/cpu.py gpt2_train --memory --json result.json

Needs an otherwise idle machine. A ratio is the peer's median time divided by ours: above 1 we are faster. To add a row,
add it to ROWS and a function of its name to WORK in work_ours.py, work_torch.py and work_flax.py.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from side_by_side import Contender, Row, chosen, machine, measure, report, report_memory, warn_if_busy

GPT2_TRAIN = dict(batch=4, length=128)
BERT = dict(batch=8, length=128)
VIT_B16 = dict(dim=768, depth=12, heads=12)
VIT_S16 = dict(dim=384, depth=12, heads=6)
TRANSLATION = dict(batch=16, length=32)

ROWS = (
    Row(
        "gpt_train",
        "training step of nanoGPT's CPU recipe (4 layers, width 128, 12 x 64), with data and optimizer",
        {"torch": 1.25, "torch_compile": 0.9, "hf_flax": 1.1},
        work={"torch_compile": "gpt_train_compiled"},
        memory=True,
    ),
    Row(
        "gpt2_forward",
        "GPT-2 124M forward, 8 x 128, all logits",
        {"torch": 1.15, "hf_flax": 1.0},
        dict(batch=8, length=128),
    ),
    Row(
        "gpt2_generate",
        "GPT-2 124M, 1 x (32 + 64) tokens, greedy, cached",
        {"torch": 1.4, "hf_flax": 6.0, "hf_flax_jitted": None},
        dict(batch=1, prompt=32, new=64),
        work={"hf_flax_jitted": "gpt2_generate_jitted"},
    ),
    Row(
        "gpt2_beam",
        "GPT-2 124M, beam search of 4, 8 x (32 + 32) tokens",
        {"torch": 1.2, "hf_flax": 3.0, "hf_flax_jitted": None},
        dict(batch=8, prompt=32, new=32, beams=4),
        work={"hf_flax_jitted": "gpt2_beam_jitted"},
    ),
    Row(
        "gpt2_train",
        "GPT-2 124M training step, 4 x 128, AdamW, clipped: for its memory (at most HF Flax's)",
        {"torch": None, "hf_flax": None},
        GPT2_TRAIN,
        memory=True,
    ),
    Row(
        "gpt2_compile",
        "tracing and compiling that training step of 12 layers (at most half of HF Flax's time)",
        {"hf_flax": 2.0},
        GPT2_TRAIN,
    ),
    Row(
        "bert_forward",
        "BERT-base masked-LM forward, 8 x 128, rows half full on average to full, all logits",
        {"torch": 1.25, "hf_flax": 1.0},
        BERT,
    ),
    Row(
        "bert_train",
        "BERT-base masked-LM training step, 8 x 128, AdamW, clipped, no dropout; ours reads out the masked tokens only",
        {"torch": 1.1, "hf_flax": 1.0},
        BERT,
        memory=True,
    ),
    Row(
        "bert_train_dropout",
        "the same with BERT's dropout of 0.1",
        {"torch": None, "hf_flax": None},
        BERT | dict(dropout=0.1),
        work=dict.fromkeys(("ours", "torch", "hf_flax"), "bert_train"),
    ),
    Row(
        "vit_forward",
        "ViT-B/16 forward, 8 x 224 x 224, logits of 1,000 classes",
        {"torch": 1.1, "hf_flax": 1.15},
        VIT_B16 | dict(batch=8),
    ),
    Row(
        "vit_train",
        "ViT-S/16 training step, 16 x 224 x 224, AdamW, clipped, no dropout",
        {"torch": 1.0, "hf_flax": 1.05},
        VIT_S16 | dict(batch=16),
        memory=True,
    ),
    Row(
        "translation_train",
        "encoder-decoder base training step, 16 x (32 + 32), 37,000 tokens, AdamW, clipped, no dropout",
        {"torch": 1.0},
        TRANSLATION,
        memory=True,
    ),
    Row(
        "translation_train_dropout",
        "the same with the paper's dropout of 0.1",
        {"torch": None},
        TRANSLATION | dict(dropout=0.1),
        work=dict.fromkeys(("ours", "torch"), "translation_train"),
    ),
    Row(
        "translation_beam",
        "encoder-decoder base translation of 16 sentences, 32 + 32 tokens, beam search of 4, encoder included",
        {"torch": 1.5},
        TRANSLATION | dict(beams=4),
        checkpoint=True,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"which rows; all by default: {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter with torch and transformers 5")
    parser.add_argument(
        "--flax-python", default=sys.executable, help="interpreter with transformers 4.57, jax and flax"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a round of one contender lasts, at least")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two contenders")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for PyTorch; JAX takes all")
    parser.add_argument("--memory", action="store_true", help="print the peak memory of training steps, too")
    parser.add_argument("--json", type=Path, help="write all results there")
    options = parser.parse_args()

    contenders = {
        "ours": Contender("work_ours", sys.executable),
        "torch": Contender("work_torch", options.torch_python),
        "torch_compile": Contender("work_torch", options.torch_python),
        "hf_flax": Contender("work_flax", options.flax_python),
        "hf_flax_jitted": Contender("work_flax", options.flax_python),
    }
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, {about['system']}, load average {about['load']:.2f}")
    warn_if_busy(about["load"])
    print("float32; medians of interleaved rounds, +- half the distance of the quartiles; ratio = peer / ours")
    data = {"machine": about, "rounds": options.rounds, "rows": {}}
    for row in chosen(options.rows, ROWS):
        results = measure(
            row,
            contenders,
            rounds=options.rounds,
            seconds=options.seconds,
            pause=options.pause,
            threads=options.threads,
        )
        data["rows"][row.name] = report(row, results)
        if options.memory and row.memory:
            report_memory(row, results)
        if options.json:
            options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
