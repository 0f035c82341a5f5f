"""nanoGPT's recipe for a laptop: a character-level GPT on Shakespeare, 4 layers of width 128, context 64, batch 12.

    python train.py --config configs/gpt_shakespeare_char_cpu.py --data.source input.txt

`input.txt` is char-rnn's tinyshakespeare (1,115,394 characters); without `--data.source` TensorFlow Datasets downloads
it. Hardware: two CPU cores (AMD EPYC). Time: under 100 seconds. Result: loss 1.722 +- 0.005 on the whole held-out
tenth (mean and standard deviation of seeds 0 to 2). nanoGPT publishes 1.88 for its settings, which differ in the
learning rate (1e-3) and in the standard deviation of the initial weights (0.02): with those we measured 1.885.
"""

from transformers_jax.data import TextData
from transformers_jax.experiment import Experiment
from transformers_jax.models import GPTConfig
from transformers_jax.tasks import LanguageModeling
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=LanguageModeling(sampling="windows"),
        model=GPTConfig(
            vocab_size=None,
            max_length=64,
            dim=128,
            depth=4,
            heads=4,
            dropout=0.0,
            attention_dropout=0.0,
            embedding_dropout=0.0,
            init_std=0.05,
            unroll=4,
        ),
        data=TextData(source="tfds:tiny_shakespeare:train+validation+test", tokenizer="character"),
        optimizer=OptimizerConfig(
            learning_rate=3e-3, warmup_steps=100, final_fraction=0.1, beta2=0.99, weight_decay=0.1, clip_norm=1.0
        ),
        training=TrainingConfig(steps=2000, batch_size=12, log_every=20, eval_every=500, checkpoint_every=500),
    )
