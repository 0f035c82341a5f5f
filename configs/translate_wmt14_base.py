"""The base Transformer of "Attention Is All You Need" (Vaswani et al. 2017), English to German.

    transformers-jax train --config translate_wmt14_base

The paper's recipe: 63 M parameters, about 25,000 source and 25,000 target tokens a batch, 100,000 steps, Adam with
beta2 0.98, 4,000 steps of warm-up and then the inverse square root, dropout and label smoothing 0.1. It publishes 27.3
BLEU on newstest2014 (tokenised, beam 4, length penalty 0.6, the last five checkpoints averaged), after 12 hours on
eight P100. Here a moving average of the weights stands for that of checkpoints, and BLEU is sacreBLEU's, on text as it
is, which gives lower figures. Batches are cut by the longer side of a pair, padding included.

The data are a TensorFlow Datasets set that needs TensorFlow once to be prepared; the error says how. Aligned files do
as well: --data.source train.en --data.target train.de, and the same for --data.validation-source and -target.

Hardware, time, result: this project has not trained it. `transformers-jax plan --config translate_wmt14_base` says what
it needs.
"""

from transformers_jax.data import TranslationData
from transformers_jax.experiment import Experiment
from transformers_jax.models import EncoderDecoderConfig
from transformers_jax.tasks import Translation
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=Translation(length=128, sample_text="The cat sat on the mat."),
        model=EncoderDecoderConfig.base(vocab_size=None, init_std=512**-0.5),
        data=TranslationData(
            source="tfds:wmt14_translate/de-en:train",
            validation_source="tfds:wmt14_translate/de-en:validation",
            source_column="en",
            target_column="de",
            vocab_size=37000,
            skip_bad=True,
        ),
        # The paper's rate is dim ** -0.5 * warmup ** -0.5 at its peak.
        optimizer=OptimizerConfig(
            learning_rate=(512 * 4000) ** -0.5,
            schedule="inverse_sqrt",
            warmup_steps=4000,
            beta2=0.98,
            epsilon=1e-9,
            clip_norm=None,
        ),
        training=TrainingConfig(
            steps=100_000,
            batch_size=64,
            batch_tokens=25_600,
            eval_batch_size=128,
            ema=0.999,
            log_every=100,
            eval_every=2_500,
            checkpoint_every=2_500,
        ),
    )
