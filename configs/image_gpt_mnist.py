"""A small Image GPT on handwritten digits of 14 x 14 pixels in 8 shades of grey, from MNIST's own files.

    python train.py --config configs/image_gpt_mnist.py --data.source mnist
    transformers-jax draw --checkpoint runs/image_gpt_mnist --output samples.png
    transformers-jax draw --checkpoint runs/image_gpt_mnist --input digits --samples 6 --output completed.png

`mnist` is a directory with the IDX files, packed or not; `tfds:mnist:train` downloads them instead. Without files for
testing (`t10k-...`) a fifth is held out. `digits` is a directory of pictures, or one; their lower halves are made anew.
Hardware: one CPU core (AMD EPYC), about forty minutes beside other work. Result, seed 0, with 6,400 of the 8,000 first
digits of the t10k file to train on: 0.360 nats a pixel on the other 1,600, of which a histogram of each place's shades
has 0.873. A DaViT (`davit_mnist.py`, seed 0) recognises 82.2 % of what it makes of their upper halves, and 98.0 % of
the whole digits in these sizes and shades (`benchmarks/completion_accuracy.py`). The learning rate has not been tuned.
"""

from transformers_jax.data import ImageData
from transformers_jax.experiment import Experiment
from transformers_jax.models import ImageGPTConfig
from transformers_jax.tasks import PixelModeling
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=PixelModeling(),
        model=ImageGPTConfig(
            image_size=14,
            channels=1,
            clusters=8,
            dim=96,
            depth=4,
            heads=3,
            dropout=0.0,
            attention_dropout=0.0,
            embedding_dropout=0.0,
            init_std=0.05,
            unroll=4,
        ),
        data=ImageData(source="mnist", validation_fraction=0.2),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_fraction=0.05, beta2=0.99, weight_decay=0.1),
        training=TrainingConfig(epochs=10, batch_size=32, ema=0.99),
    )
