"""ViT-S/16 from scratch on ImageNet-1k in 90 epochs (Beyer et al. 2022, "Better plain ViT baselines for ImageNet-1k").

    python train.py --config configs/vit_s16_imagenet.py --data.source imagenet --training.data-processes 64

`imagenet` holds class folders below `train/` and `val/`; `tfds:imagenet2012` is read, too, once it is prepared.
Hardware: eight GPUs or TPUs; not run here. The paper reports 76.5 % top-1 for this recipe with big_vision.

The recipe as it is published: batches of 1,024, Inception crops, flips, RandAugment(2, 10), mixup 0.2, mean pooling, no
class token, fixed 2-D sines, cosine schedule after 10,000 steps of warm-up. big_vision subtracts weight decay 1e-4
times the schedule, without the learning rate of 1e-3; here it is 0.1 times the learning rate, which is the same.
RandAugment's magnitude 10 there is on a scale of 10, here of 30.
"""

from transformers_jax.data import Augmentation, ImageData
from transformers_jax.experiment import Experiment
from transformers_jax.models import ViTConfig
from transformers_jax.tasks import ImageClassification
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=ImageClassification(
            augmentation=Augmentation(crop_scale=(0.05, 1.0), flip=0.5, rand_augment=2, magnitude=30),
            crop_fraction=0.875,
            mixup=0.2,
        ),
        model=ViTConfig.s16(pooling="mean", class_token=False, positions="sinusoidal", dtype="bfloat16"),
        data=ImageData(source="imagenet"),
        optimizer=OptimizerConfig(
            learning_rate=1e-3,
            warmup_steps=10_000,
            weight_decay=0.1,
            decay_rule="kernels",
            clip_norm=1.0,
            moment_dtype="bfloat16",
        ),
        training=TrainingConfig(epochs=90, batch_size=1024, log_every=50, data_processes=16),
    )
