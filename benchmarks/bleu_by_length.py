"""BLEU by the length of the source: what a fixed context costs long sentences (Cho et al. 2014; Bahdanau et al. 2015,
figure 2).

    python benchmarks/bleu_by_length.py runs/transformer runs/attention runs/fixed_context --plot bleu_by_length.png

Every run translates the same held-out sentences: those of the first run's data, or `--source` and `--target` (aligned
files, or a table with both). A length is the number of words between blanks, the same for all models; without `--edges`
the buckets are about equally full. BLEU is sacreBLEU's, over all sentences of a bucket. The plot needs matplotlib (the
`plots` extra) and is drawn only with `--plot`; nothing else is written.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformers_jax import load
from transformers_jax.data import SentencePair, TranslationData, read_pairs
from transformers_jax.tasks import Translation
from transformers_jax.tasks.metrics import translation_metrics, translation_rule
from transformers_jax.training.process import prepare_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="directories of runs or checkpoints; NAME=DIRECTORY gives it a name")
    parser.add_argument("--source", help="sentences to translate, instead of the first run's held-out ones")
    parser.add_argument("--target", help="their translations; unset: the source is a table with both")
    parser.add_argument("--beams", type=int, default=1, help="1: the likeliest token at each step (greedy)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--edges", type=int, nargs="+", help="the longest sentence, in words, of each bucket but the last"
    )
    parser.add_argument("--limit", type=int, help="take so many sentences only")
    parser.add_argument("--plot", type=Path, help="draw the table into this file (.png, .pdf, .svg)")
    options = parser.parse_args()
    prepare_process()
    if options.target is not None and options.source is None:
        raise ValueError("--target needs --source, the sentences that it translates")

    pairs: list[SentencePair] = []
    scores: dict[str, list[float]] = {}
    buckets: list[np.ndarray] = []
    lengths, tokenize, rule = np.zeros(0, int), None, ""
    runs = [run.split("=", 1) if "=" in run else [Path(run).resolve().name, run] for run in options.runs]
    if len({name for name, _ in runs}) < len(runs):
        raise ValueError("two runs have the same name; NAME=DIRECTORY gives them others")
    for number, (name, directory) in enumerate(runs):
        loaded = load(directory, settings={"beams": options.beams, "n_best": 1})
        if not isinstance(loaded.task, Translation):
            raise ValueError(f"{directory} is of {type(loaded.task).__name__}, not of Translation")
        if number == 0:
            pairs = held_out(loaded, options)[: options.limit]
            lengths = np.array([len(pair.source.split()) for pair in pairs])
            buckets = fill(lengths, options.edges)
            rule = translation_rule(loaded.task.bleu_tokenize).split(", ")[0]
            tokenize = loaded.task.bleu_tokenize
        found = loaded.predict([pair.source for pair in pairs], batch_size=options.batch_size)
        written = [prediction["translation"] for prediction in found]
        scores[name] = [
            translation_metrics([written[i] for i in part], [pairs[i].target for i in part], tokenize)["bleu"]
            for part in (*buckets, np.arange(len(pairs)))
        ]
        print(f"{name}: {len(pairs):,} sentences translated", file=sys.stderr)

    names = [span(lengths[part]) for part in buckets]
    rows = [["words", "sentences", *scores]]
    for i, (name, part) in enumerate(zip([*names, "all"], [*buckets, lengths], strict=True)):
        rows.append([name, f"{len(part):,}", *(f"{values[i]:.2f}" for values in scores.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"{rule}; {'greedy' if options.beams == 1 else f'{options.beams} beams'}")
    if options.plot is not None:
        draw(options.plot, [float(lengths[part].mean()) for part in buckets], names, scores)


def held_out(loaded: Any, options: argparse.Namespace) -> list[SentencePair]:
    if options.source is not None:
        columns: dict[str, Any] = {}
        if loaded.experiment is not None and isinstance(loaded.experiment.data, TranslationData):
            data = loaded.experiment.data
            columns = dict(source_column=data.source_column, target_column=data.target_column)
        return read_pairs(TranslationData(source=options.source, target=options.target, **columns), part="all")
    if loaded.experiment is None:
        raise ValueError("a checkpoint has no held-out sentences of its own; give --source and --target")
    return read_pairs(loaded.experiment.data, part="validation")


def fill(lengths: np.ndarray, edges: Sequence[int] | None, count: int = 6) -> list[np.ndarray]:
    """The sentences of each bucket, shortest first: those up to each edge, and the longer ones; empty ones left out."""
    if edges is None:
        edges = np.quantile(lengths, np.arange(1, count) / count, method="lower").tolist()
    places = np.searchsorted(np.unique(np.asarray(edges)), lengths)
    return [np.flatnonzero(places == place) for place in np.unique(places)]


def span(lengths: np.ndarray) -> str:
    low, high = int(lengths.min()), int(lengths.max())
    return str(low) if low == high else f"{low}-{high}"


def draw(path: Path, places: Sequence[float], names: Sequence[str], scores: dict[str, list[float]]) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib: pip install 'transformers-jax[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, values), marker in zip(scores.items(), "osD^vP*X" * len(scores), strict=False):
        axes.plot(places, values[:-1], marker=marker, label=f"{name} ({values[-1]:.1f} in all)")
    axes.set_xticks(places, names)
    axes.set_xlabel("words in the source")
    axes.set_ylabel("BLEU")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
