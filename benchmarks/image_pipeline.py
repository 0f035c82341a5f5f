"""Images a second: decoded, cut at random, resized to 224 x 224, mirrored and batched, against PyTorch's DataLoader.

python benchmarks/image_pipeline.py                    # JPEGs of 500 x 375 pixels, made for it
python benchmarks/image_pipeline.py --folder images    # a directory with a folder for each class

Both do the same with Pillow and NumPy, with as many workers: processes, or for 0 a thread of ours and DataLoader's main
process. Rows "uint8" end with bytes. Rows "normalised" end with floats: PyTorch's workers normalise each image, as
torchvision's ToTensor and Normalize do, and ours sends bytes to the device, which normalises the batch, as training
does. Each figure is a process of its own that warms up until its buffers are in steady state.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from side_by_side import machine, warn_if_busy

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PREFETCH = 4
BAR = 1.0


def make_folder(folder: Path, count: int) -> None:
    """JPEGs of 500 x 375 and 375 x 500 pixels with shapes and noise, in two classes; about 100 kB each."""
    rng = np.random.default_rng(0)
    for number in range(count):
        width, height = (500, 375) if number % 3 else (375, 500)
        image = Image.new("RGB", (width, height), tuple(map(int, rng.integers(256, size=3))))
        draw = ImageDraw.Draw(image)
        for _ in range(40):
            x, y, w, h = (int(value) for value in rng.integers(0, (width, height, width // 2, height // 2)))
            shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
            shape((x, y, x + w, y + h), fill=tuple(map(int, rng.integers(256, size=3))))
        pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(1))) + rng.normal(0, 14, (height, width, 3))
        path = folder / f"class{number % 2}" / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=90)


def ours(folder: str, batch_size: int, workers: int, normalised: bool) -> Iterator[Any]:
    import grain
    import jax
    import jax.numpy as jnp

    from transformers_jax.data import Augmentation, ImageData, ImageProcessor, read_images, training_batches
    from transformers_jax.data.image_examples import AugmentImage, ImageExamples

    images = read_images(ImageData(folder, check="none"), part="all")
    processor = ImageProcessor.standard(SIZE, mean=MEAN, std=STD, resampling="bilinear")
    augment = AugmentImage(Augmentation(crop_scale=(0.08, 1.0), flip=0.5), processor)
    numbers = range(len(images))
    dataset = grain.MapDataset.source(ImageExamples(images, numbers, [i % 2 for i in numbers])).random_map(
        augment, seed=0
    )
    batches = training_batches(
        dataset, batch_size=batch_size, seed=0, num_threads=1, processes=workers, prefetch=PREFETCH
    )
    normalise = jax.jit(lambda pixels: (pixels / 255.0 - jnp.array(MEAN)) / jnp.array(STD))
    for batch in batches:
        yield normalise(batch["pixels"]).block_until_ready() if normalised else batch["pixels"]


class Folder:
    """What one writes for a DataLoader: opened and changed with Pillow, as torchvision's transforms do it."""

    def __init__(self, folder: str, normalised: bool):
        self.paths = sorted(str(path) for path in Path(folder).rglob("*.jpg"))
        self.normalised = normalised

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        with open(self.paths[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        image = image.crop(random_box(*image.size)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = np.array(image)
        if self.normalised:
            pixels = (pixels.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
        return torch.from_numpy(pixels), index % 2


def random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def pytorch(folder: str, batch_size: int, workers: int, normalised: bool) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    options: dict[str, Any] = (
        {"persistent_workers": True, "prefetch_factor": -(-PREFETCH // workers)} if workers else {}
    )
    loader = DataLoader(
        Folder(folder, normalised), batch_size, shuffle=True, drop_last=True, num_workers=workers, **options
    )
    while True:
        for pixels, _ in loader:
            yield pixels


CONTENDERS = {"ours": ours, "PyTorch": pytorch}


@dataclass(frozen=True)
class Measurement:
    """What a process of its own is told to measure."""

    contender: str
    folder: str
    batch_size: int
    workers: int
    normalised: bool
    batches: int


def measure(what: Measurement) -> float:
    """Images a second in steady state."""
    made = CONTENDERS[what.contender](what.folder, what.batch_size, what.workers, what.normalised)
    for _ in itertools.islice(made, PREFETCH + 2 * what.workers + 2):  # what lay ready is used up
        pass
    begin = time.perf_counter()
    for batch in itertools.islice(made, what.batches):
        assert batch.shape == (what.batch_size, SIZE, SIZE, 3)
    return what.batches * what.batch_size / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a directory of JPEGs, instead of one made for it")
    parser.add_argument("--images", type=int, default=2048, help="how many are made")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=24, help="how many a round takes")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(measure(Measurement(**json.loads(options.measure))))
        return

    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load average {about['load']:.2f}")
    warn_if_busy(about["load"])
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        if options.folder is None:
            make_folder(folder, options.images)
        for workers, normalised in itertools.product(options.workers, (False, True)):
            rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
            for _, name in itertools.product(range(options.rounds), CONTENDERS):
                what = Measurement(name, str(folder), options.batch_size, workers, normalised, options.batches)
                command = [sys.executable, __file__, "--measure", json.dumps(vars(what))]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                rates[name].append(float(done.stdout.split()[-1]))
            median = {name: statistics.median(values) for name, values in rates.items()}
            ratio = median["ours"] / median["PyTorch"]
            print(f"{workers} workers, {'normalised' if normalised else 'uint8'}: ratio {ratio:.2f}, bar {BAR:.2f} "
                  f"{'reached' if ratio >= BAR else 'NOT reached'}")  # fmt: skip
            for name, values in rates.items():
                print(f"  {name:8} {median[name]:6.0f} images a second ({min(values):.0f} to {max(values):.0f})")


if __name__ == "__main__":
    main()
