"""How often a classifier recognises what an Image GPT makes of half a picture.

    python benchmarks/completion_accuracy.py runs/image_gpt_mnist runs/vit_mnist --limit 500 --samples 4

The upper half of each held-out picture of the Image GPT's data is completed several times, and the classifier names the
class of each completion. It is a run of image classification on the same classes; where both runs have the same source
and the same fraction held out, these pictures are held out from both. The other lines say what that is to be compared
with: the whole pictures as they are, the whole pictures in the size and the colours of the Image GPT (what a perfect
completion would reach), and the halves with nothing below (the first colour of the palette). `--picture` writes the
first completions in a grid; nothing else is written.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformers_jax import load
from transformers_jax.data import ImageData, read_images
from transformers_jax.generation import Sampling
from transformers_jax.models import LanguageModel
from transformers_jax.pictures import grid_of, load_image_gpt, prepared
from transformers_jax.tasks import ImageClassification, complete_pictures
from transformers_jax.tasks.pixel_modeling import rows_given
from transformers_jax.training.process import prepare_process

SHOWN = 8
"""Pictures in the grid."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image_gpt", help="a run of Image GPT")
    parser.add_argument("classifier", help="a run of image classification")
    parser.add_argument("--data", help="labelled pictures, all of them, instead of those that the Image GPT held out")
    parser.add_argument("--given", type=float, default=0.5, help="the share of the rows that is given")
    parser.add_argument("--samples", type=int, default=4, help="completions of each picture")
    parser.add_argument("--limit", type=int, default=500, help="take so many pictures only, spread over all")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--picture", type=Path, help="write the first completions into this PNG")
    options = parser.parse_args()
    prepare_process()
    drawer, judge = load_image_gpt(options.image_gpt), load(options.classifier)
    if not isinstance(drawer.model, LanguageModel):
        raise ValueError(f"{options.image_gpt} holds no layer that predicts pixels")
    if not isinstance(judge.task, ImageClassification):
        raise ValueError(f"{options.classifier} is of {type(judge.task).__name__}, not of ImageClassification")
    data: Any = None if drawer.experiment is None else drawer.experiment.data
    if options.data is not None:
        data = ImageData(source=options.data)
    if data is None:
        raise ValueError(f"{options.image_gpt} has no held-out pictures of its own; give --data")
    held_out = read_images(
        data, part="validation" if options.data is None else "all", channels=drawer.model.config.channels
    )
    if unknown := sorted(set(held_out.labels) - set(judge.labels)):
        known = ", ".join(judge.labels)
        raise ValueError(f"{options.classifier} does not know the class {unknown[0]!r}; it has {known}")
    if options.limit < 1:
        raise ValueError(f"--limit {options.limit} must be at least 1")
    places = np.linspace(0, len(held_out) - 1, min(options.limit, len(held_out)))
    chosen = np.unique(places.round().astype(int)).tolist()
    pictures, labels = [held_out.read(i) for i in chosen], [held_out.labels[i] for i in chosen]

    pixels = prepared(drawer, pictures)
    processor = drawer.processor
    whole = processor.pixels(processor.ids(pixels))
    rows = rows_given(options.given, pixels.shape[1])
    halves = whole.copy()
    halves[:, rows:] = processor.pixels(np.zeros(drawer.model.config.places, int))[rows:]
    made = complete_pictures(
        drawer.model,
        processor,
        pixels,
        given=options.given,
        samples=options.samples,
        sampling=Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p),
        key=jax.random.key(options.seed),
        batch_size=options.batch_size,
    )

    def accuracy(pictures: Any, labels: list[str]) -> float:
        found = judge.predict(list(pictures), batch_size=options.batch_size)
        return float(np.mean([one["label"] == label for one, label in zip(found, labels, strict=True)]))

    repeated = [label for label in labels for _ in range(options.samples)]
    print(f"{len(labels):,} pictures, {rows} of {pixels.shape[1]} rows given, {options.samples} completions of each")
    for name, value in (
        ("whole pictures", accuracy(pictures, labels)),
        ("whole pictures in the palette", accuracy(whole, labels)),
        ("halves, nothing below", accuracy(halves, labels)),
        ("completions", accuracy(made.reshape(-1, *made.shape[2:]), repeated)),
    ):
        print(f"{name:<30} {value:7.2%}")
    if options.picture is not None:
        shown = np.concatenate([whole[:SHOWN, None], halves[:SHOWN, None], made[:SHOWN]], axis=1)
        grid_of(shown).save(options.picture)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
