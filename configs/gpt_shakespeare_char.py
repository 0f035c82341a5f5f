"""nanoGPT's recipe for one GPU: a character-level GPT on Shakespeare, 6 layers of width 384, context 256, bfloat16.

    python train.py --config configs/gpt_shakespeare_char.py --data.source input.txt

`input.txt` is char-rnn's tinyshakespeare; without `--data.source` TensorFlow Datasets downloads it. Hardware: one
GPU. Not run by us yet; nanoGPT publishes a best validation loss of 1.4697, after about three minutes on an A100.
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
            max_length=256,
            dim=384,
            depth=6,
            heads=6,
            dropout=0.2,
            attention_dropout=0.2,
            embedding_dropout=0.2,
            dtype="bfloat16",
        ),
        data=TextData(source="tfds:tiny_shakespeare:train+validation+test", tokenizer="character"),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=100, final_fraction=0.1, beta2=0.99, weight_decay=0.1, clip_norm=1.0
        ),
        training=TrainingConfig(steps=5000, batch_size=64, log_every=20, eval_every=250, checkpoint_every=1000),
    )
