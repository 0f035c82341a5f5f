"""Fine-tune a ViT on a folder of pictures, one folder a class, at any resolution.

    transformers-jax train --config vit_finetune_folder --initial-checkpoint DIRECTORY --data.source pictures

The checkpoint is a Hugging Face one (ViT or DeiT; a directory, or a name on the hub such as
google/vit-base-patch16-224-in21k) or a run's working directory. `--task.image-size 384` trains at another resolution
than the checkpoint's: its positions are resized. A new head starts with zeros. `pictures` holds class folders, or
`train/` and `val/` with some; without `val/` a tenth of the pictures is held out.
"""

from transformers_jax.data import Augmentation, ImageData
from transformers_jax.experiment import Experiment
from transformers_jax.models import ViTConfig
from transformers_jax.tasks import ImageClassification
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=ImageClassification(augmentation=Augmentation(crop_scale=(0.35, 1.0), flip=0.5), new_head=True),
        model=ViTConfig.ti16(stochastic_depth=0.1),  # its sizes only without a checkpoint
        data=ImageData(source="pictures"),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_fraction=0.1, weight_decay=0.05, decay_rule="kernels", layer_decay=0.75
        ),
        training=TrainingConfig(epochs=20, batch_size=64, ema=0.99, data_processes=2),
    )
