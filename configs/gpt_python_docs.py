"""A small GPT that learns to write like the Python documentation, from text that ships with Python.

    make train                        # or: python train.py --config configs/gpt_python_docs.py

Hardware: two CPU cores (AMD EPYC). Time: about five minutes (5.9 k tokens a second). Result: 3.90 nats a token (BPE of
1,024 tokens), 1.93 bits a byte, on the held-out tenth. The text is that of Python 3.11; other versions' differs a
little.
"""

from transformers_jax.data import TextData
from transformers_jax.experiment import Experiment
from transformers_jax.models import GPTConfig
from transformers_jax.tasks import LanguageModeling
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=LanguageModeling(sample_prompt="The", sample_tokens=200),
        model=GPTConfig(
            vocab_size=None,
            max_length=256,
            dim=192,
            depth=4,
            heads=6,
            unroll=4,
            dropout=0.1,
            attention_dropout=0.0,
            embedding_dropout=0.1,
        ),
        data=TextData(source="builtin:python-docs", tokenizer="bpe", vocab_size=1024),
        optimizer=OptimizerConfig(
            learning_rate=2e-3, warmup_steps=50, final_fraction=0.1, beta2=0.99, weight_decay=0.1
        ),
        training=TrainingConfig(steps=400, batch_size=16, log_every=10, eval_every=50, checkpoint_every=100),
    )
