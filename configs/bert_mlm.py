"""A small BERT pretrained from scratch on the Python documentation, from text that ships with Python.

    python train.py --config configs/bert_mlm.py

4 layers of width 128; 847 examples of 128 tokens, seen 76 times in all, with other tokens hidden each time.
`benchmarks/reference_mlm.py` is the same recipe in PyTorch. Hardware: two CPU cores (AMD EPYC); the time was not taken
alone. Result: masked loss 3.440 nats on the held-out tenth (seed 0), from ln(vocabulary) = 8.318; PyTorch: 3.444.
"""

from transformers_jax.data import TextData
from transformers_jax.experiment import Experiment
from transformers_jax.models import BertConfig
from transformers_jax.tasks import MaskedLM
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=MaskedLM(sample_text="If the [MASK] is omitted, the [MASK] of the list is returned."),
        model=BertConfig(vocab_size=None, max_length=128, dim=128, depth=4, heads=2, dropout=0.1, unroll=4),
        data=TextData(source="builtin:python-docs", tokenizer="wordpiece", vocab_size=4096),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="linear", warmup_fraction=0.1, weight_decay=0.01),
        training=TrainingConfig(steps=2000, batch_size=32, log_every=20, eval_every=200, checkpoint_every=500),
    )
