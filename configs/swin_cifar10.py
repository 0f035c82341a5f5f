"""A Swin on CIFAR-10: 50,000 pictures of 32 x 32 pixels in ten classes, which TensorFlow Datasets downloads once.

    python train.py --config configs/swin_cifar10.py

Or a directory of class folders: `--data.source DIRECTORY --data.validation-source None`. The recipe is that of
`vit_cifar10.py`. Not run whole here. The counterpart of the small ViT there, for a few hundred pictures:
`--data.validation-fraction 0.2 --model.patch-size 4 --model.dims 64 128 --model.depths 4 2 --model.heads 4 8
--model.init-std 0.1 --training.epochs 50 --training.batch-size 64 --training.ema 0.99 --training.data-processes 1`.
With 800 pictures to train on it reached 30.5 +- 1.0 % on 200 others (three seeds; the ViT in as many epochs 30.0 +-
1.7 %, DaViT 40.5 +- 2.0 %), in 9 minutes a seed on one CPU core (AMD EPYC) beside other work.
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
            augmentation=Augmentation(shift=0.125, flip=0.5, rand_augment=2, magnitude=9),
            mixup=0.8,
            cutmix=1.0,
            label_smoothing=0.1,
        ),
        model=SwinConfig(
            image_size=32,
            patch_size=2,
            dims=(64, 128, 256),
            depths=(2, 6, 2),
            heads=(2, 4, 8),
            mlp_ratio=2.0,
            window=4,
            stochastic_depth=0.1,
        ),
        data=ImageData(source="tfds:cifar10:train", validation_source="tfds:cifar10:test"),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_fraction=0.05, weight_decay=0.05, decay_rule="kernels", clip_norm=1.0
        ),
        training=TrainingConfig(epochs=200, batch_size=128, ema=0.999, data_processes=2),
    )
