"""A small ViT on scikit-learn's handwritten digits, 1,797 pictures of 8 x 8 pixels: runs anywhere.

    python train.py --config configs/vit_digits.py

A fifth of the digits is held out. Hardware: two CPU cores (AMD EPYC), 1 minute 41 seconds. Result: accuracy
98.9 +- 0.5 % (seeds 0 to 2 on one core: 99.4, 98.6 and 98.6; seed 0 on two: 98.9).
"""

from transformers_jax.data import Augmentation, ImageData
from transformers_jax.experiment import Experiment
from transformers_jax.models import ViTConfig
from transformers_jax.tasks import ImageClassification
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=ImageClassification(augmentation=Augmentation(rotate=5), mixup=0.2, label_smoothing=0.1),
        model=ViTConfig(
            image_size=8,
            patch_size=2,
            channels=1,
            dim=64,
            depth=6,
            heads=4,
            pooling="mean",
            init_std=0.1,  # 4 layers, no augmentation: 87 % after 30 epochs with 0.02, 96 % after 15 with 0.1
            unroll=6,
        ),
        data=ImageData(source="builtin:digits", validation_fraction=0.2),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, warmup_fraction=0.05, beta2=0.99, weight_decay=0.05, decay_rule="kernels"
        ),
        training=TrainingConfig(epochs=100, batch_size=64, ema=0.99, eval_every=460, checkpoint_every=460),
    )
