"""nanoGPT's CPU recipe in PyTorch: the losses that configs/gpt_shakespeare_char_cpu.py is held against.

    python benchmarks/reference_gpt.py shakespeare.txt

A character-level GPT (4 layers, 4 heads, width 128, context 64, no dropout), batch 12, 2,000 updates, AdamW 1e-3 with
100 updates of warm-up and a cosine to 1e-4, betas 0.9 and 0.99, decay 0.1, gradients clipped to 1. The last tenth of
the characters is held out and evaluated whole, every character but the first predicted once, in blocks of 64.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_gpt import GPT, Sizes, make_optimizer, random_crops, train_step

BATCH, PEAK, FINAL, WARM_UP = 12, 1e-3, 1e-4, 100


def learning_rate(update: int, updates: int) -> float:
    if update < WARM_UP:
        return PEAK * update / WARM_UP
    progress = (update - WARM_UP) / max(1, updates - WARM_UP)
    return FINAL + (PEAK - FINAL) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def evaluate(model: GPT, tokens: Tensor, length: int) -> float:
    """Mean loss in nats over all of `tokens` but the first."""
    whole = (len(tokens) - 1) // length
    inputs = tokens[: whole * length].view(whole, length).split(256)
    labels = tokens[1 : whole * length + 1].view(whole, length).split(256)
    pairs = list(zip(inputs, labels, strict=True))
    if whole * length < len(tokens) - 1:
        pairs.append((tokens[None, whole * length : -1], tokens[None, whole * length + 1 :]))
    total = sum(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item() for x, y in pairs)
    return total / (len(tokens) - 1)


def train(train_tokens: Tensor, held_out: Tensor, sizes: Sizes, *, seed: int, updates: int) -> float:
    """The held-out loss after training."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT(sizes)
    optimizer = make_optimizer(model, learning_rate=PEAK)
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update, updates)
        train_step(model, optimizer, *random_crops(train_tokens, BATCH, sizes.length, generator))
    return evaluate(model, held_out, sizes.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+", help="text files; several are read one after the other")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()

    text = "".join(path.read_text(encoding="utf-8") for path in options.text)
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[character] for character in text])
    train_tokens, held_out = tokens.tensor_split([int(len(tokens) * 0.9)])
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {len(number)} characters, "
          f"{len(train_tokens):,} to train on, {len(held_out):,} held out")  # fmt: skip
    losses = []
    for seed in options.seeds:
        begin = time.perf_counter()
        losses.append(train(train_tokens, held_out, Sizes(vocab_size=len(number)), seed=seed, updates=options.steps))
        print(f"seed {seed}: {losses[-1]:.4f} nats a character, {time.perf_counter() - begin:.0f} s", flush=True)
    if len(losses) > 1:
        print(f"mean {statistics.mean(losses):.4f}, standard deviation {statistics.stdev(losses):.4f}")


if __name__ == "__main__":
    main()
