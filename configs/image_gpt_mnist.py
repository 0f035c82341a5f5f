"""A small Image GPT on handwritten digits of 14 x 14 pixels in 8 shades of grey, from MNIST's own files.

    python train.py --config configs/image_gpt_mnist.py --data.source mnist
    transformers-jax draw --checkpoint runs/image_gpt_mnist --output samples.png
    transformers-jax draw --checkpoint runs/image_gpt_mnist --input digits --samples 6 --output completed.png

`mnist` is a directory with the IDX files, packed or not; `tfds:mnist:train` downloads them instead. Without files for
testing (`t10k-...`) a fifth is held out. `digits` is a directory of pictures, or one; their lower halves are made anew.
The learning rate and the number of epochs have not been tuned, and the whole run has not been measured; a histogram of
each place's shades has a loss of 0.873 nats a pixel on the held-out 1,600 of the 8,000 digits of the t10k file.
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
            dim=64,
            depth=4,
            heads=4,
            dropout=0.0,
            attention_dropout=0.0,
            embedding_dropout=0.0,
            init_std=0.05,
            unroll=4,
        ),
        data=ImageData(source="mnist", validation_fraction=0.2),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_fraction=0.05, beta2=0.99, weight_decay=0.1),
        training=TrainingConfig(epochs=20, batch_size=32, ema=0.99),
    )
