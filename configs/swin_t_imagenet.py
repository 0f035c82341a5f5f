"""Swin-T from scratch on ImageNet-1k in 300 epochs (Liu et al. 2021, appendix A2.1).

    python train.py --config configs/swin_t_imagenet.py --data.source imagenet --training.data-processes 64

`imagenet` holds class folders below `train/` and `val/`; `tfds:imagenet2012` is read, too, once it is prepared.
Hardware: eight GPUs or TPUs; not run here. The paper reports 81.3 % top-1 for this recipe, which is here as published:
batches of 1,024, 20 epochs of warm-up, stochastic depth 0.2, RandAugment, mixup, CutMix, random erasing.

To go on at another resolution from a checkpoint of Hugging Face (a directory, or a name on the hub such as
microsoft/swin-tiny-patch4-window7-224), with larger windows, for which the tables of position biases are resized:

    python train.py --config configs/swin_t_imagenet.py --initial-checkpoint DIRECTORY --data.source pictures
        --task.image-size 384 --model.resize-window 12 --task.new-head --training.epochs 30
"""

from transformers_jax.data import Augmentation, ImageData
from transformers_jax.experiment import Experiment
from transformers_jax.models import SwinConfig
from transformers_jax.tasks import ImageClassification
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=ImageClassification(
            augmentation=Augmentation(crop_scale=(0.08, 1.0), flip=0.5, rand_augment=2, magnitude=9, erasing=0.25),
            crop_fraction=0.875,
            mixup=0.8,
            cutmix=1.0,
            label_smoothing=0.1,
        ),
        model=SwinConfig.tiny(dtype="bfloat16", image_mean=(0.485, 0.456, 0.406), image_std=(0.229, 0.224, 0.225)),
        data=ImageData(source="imagenet"),
        optimizer=OptimizerConfig(
            learning_rate=1e-3,
            warmup_fraction=20 / 300,
            final_fraction=0.005,
            weight_decay=0.05,
            decay_rule="kernels",
            clip_norm=5.0,
        ),
        training=TrainingConfig(epochs=300, batch_size=1024, log_every=50, data_processes=16),
    )
