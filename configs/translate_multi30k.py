"""A small Transformer that learns to translate German into English from the 29,000 sentences of Multi30k.

    transformers-jax train --config translate_multi30k \
        --data.source train.de --data.target train.en --data.validation-source val.de --data.validation-target val.en

(Elliott et al. 2016; the files are those of its task 1, github.com/multi30k/dataset, also as .gz.) Swap the files for
the other direction. Width 256, three layers on either side, one vocabulary of 8,000 pieces for both languages.

Hardware: one CPU core (AMD EPYC), 48 minutes of its time, evaluations included. After six epochs, on the whole
validation set: BLEU 29.8 +- 0.6, chrF 51.3 +- 0.4 (29.9, 29.2, 30.4 with seeds 0, 1, 2); transformers' Marian in
PyTorch with the same recipe (benchmarks/reference_translation.py, seed 0): BLEU 29.3, chrF 51.0.
"""

from transformers_jax.data import TranslationData
from transformers_jax.experiment import Experiment
from transformers_jax.models import EncoderDecoderConfig
from transformers_jax.tasks import Translation
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=Translation(length=64, sample_text="Ein Hund rennt durch den Schnee."),
        model=EncoderDecoderConfig.marian(
            vocab_size=None, max_length=256, dim=256, depth=3, heads=4, mlp_dim=1024, unroll=3, init_std=256**-0.5
        ),
        data=TranslationData(source="train.de", target="train.en"),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_fraction=0.1, final_fraction=0.02, beta2=0.98, weight_decay=0.01
        ),
        training=TrainingConfig(epochs=6, batch_size=8, batch_tokens=2048, eval_batch_size=64, log_every=20),
    )
