"""What the Transformer replaced, on the data and with the budget of translate_multi30k.py: a recurrent encoder-decoder
with attention (Bahdanau et al. 2015) or, with `--model.attention-score None`, with one fixed context vector (Cho et
al. 2014).

    transformers-jax train --config translate_recurrent \
        --data.source train.de --data.target train.en --data.validation-source val.de --data.validation-target val.en

The width makes it about as large as the Transformer there (7.3 and 7.6 M parameters). `benchmarks/bleu_by_length.py`
draws what a fixed context costs long sentences.

Hardware: one CPU core (AMD EPYC). After six epochs, seed 0, on the whole validation set: BLEU 30.8, chrF 52.9 with
attention; BLEU 18.4, chrF 39.9 with the fixed context.
"""

from transformers_jax.data import TranslationData
from transformers_jax.experiment import Experiment
from transformers_jax.models import RecurrentSeq2SeqConfig
from transformers_jax.tasks import Translation
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=Translation(length=64, sample_text="Ein Hund rennt durch den Schnee."),
        model=RecurrentSeq2SeqConfig(vocab_size=None, max_length=256, dim=448),
        data=TranslationData(source="train.de", target="train.en"),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_fraction=0.1, final_fraction=0.02, beta2=0.98, weight_decay=0.01
        ),
        training=TrainingConfig(epochs=6, batch_size=8, batch_tokens=2048, eval_batch_size=64, log_every=20),
    )
