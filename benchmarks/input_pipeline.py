"""Is the input pipeline fast enough, does it keep the device waiting, and what memory does preparing a text take?

python benchmarks/input_pipeline.py                   # batches a second, and the share of waiting
python benchmarks/input_pipeline.py --prepare-gb 2    # and the peak memory of tokenising 2 GB of text
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import machine, warn_if_busy
from worker import reset_peak, status

from transformers_jax.data import TextData, prepare_corpus, token_blocks, training_batches
from transformers_jax.training.loop import TrainingConfig

SHAPES = ((12, 64), (8, 1024))
STEP_SECONDS = 0.010


def pipeline(batch_size: int, length: int) -> Iterator[dict[str, Any]]:
    """What a training run reads: the loop's defaults for threads and prefetching."""
    tokens = np.random.default_rng(0).integers(50257, size=10_000_000, dtype=np.uint16)
    settings = TrainingConfig()
    return training_batches(
        token_blocks(tokens, length, sampling="windows"),
        batch_size=batch_size,
        seed=0,
        num_threads=settings.data_workers,
        prefetch=settings.prefetch,
    )


def batches_per_second(batch_size: int, length: int, seconds: float, rounds: int) -> list[float]:
    batches, rates = pipeline(batch_size, length), []
    for _ in range(20):
        next(batches)
    for _ in range(rounds):
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            next(batches)
            count += 1
        rates.append(count / (time.perf_counter() - begin))
    return rates


def share_of_waiting(batch_size: int, length: int, steps: int) -> float:
    """The share of the time that a step of 10 ms on a device (here: asleep) waits for its next batch."""
    batches, waited = pipeline(batch_size, length), 0.0
    next(batches)
    begin = time.perf_counter()
    for _ in range(steps):
        time.sleep(STEP_SECONDS)
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
    return waited / (time.perf_counter() - begin)


def write_text(path: Path, size: int) -> None:
    """About `size` bytes of made-up lines of made-up words, none of them held in memory."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(rng.choice(letters, rng.integers(1, 11))) for _ in range(20_000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            picked = rng.zipf(1.3, 100_000) % len(words)
            text = " ".join(words[i] for i in picked)
            file.write("".join(text[i : i + 200].strip() + "\n" for i in range(0, len(text), 200)))


def prepare(path: Path, tokenizer: str, cache: Path) -> None:
    """Tokenise the text in this process, and say what it took."""
    reset_peak()
    imports = status("VmRSS")
    begin = time.perf_counter()
    corpus = prepare_corpus(TextData(source=str(path), tokenizer=tokenizer, vocab_size=4096, cache_dir=str(cache)))
    seconds = time.perf_counter() - begin
    print(f"{tokenizer:9}  {len(corpus.train) + len(corpus.validation):,} tokens in {seconds:.0f} s, "
          f"{path.stat().st_size / 1e6 / seconds:.1f} MB/s; peak memory {status('VmHWM'):.0f} MB, "
          f"of which imports {imports:.0f} MB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a round lasts")
    parser.add_argument("--steps", type=int, default=300, help="simulated steps when measuring the waiting")
    parser.add_argument("--prepare-gb", type=float, default=0.0, help="prepare a text of this size, made for it")
    parser.add_argument("--tokenizers", nargs="+", default=["byte", "character", "bpe"], help="for --prepare-gb")
    parser.add_argument("--prepare-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare_file:  # a process of its own, so that its peak of memory is its own
        prepare(options.prepare_file, options.tokenizers[0], options.prepare_file.parent / "cache")
        return

    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load average {about['load']:.2f}")
    warn_if_busy(about["load"])
    for batch_size, length in SHAPES:
        rates = batches_per_second(batch_size, length, options.seconds, options.rounds)
        waiting = share_of_waiting(batch_size, length, options.steps)
        print(f"{batch_size:3} x {length:4}: {statistics.median(rates):7.0f} batches a second "
              f"({min(rates):.0f} to {max(rates):.0f}); steps of 10 ms wait {waiting:.1%} of the time")  # fmt: skip
    if options.prepare_gb:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text.txt"
            write_text(path, int(options.prepare_gb * 1e9))
            print(f"preparing {path.stat().st_size / 1e9:.2f} GB of text")
            for tokenizer in options.tokenizers:
                command = [sys.executable, __file__, "--prepare-file", str(path), "--tokenizers", tokenizer]
                subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
