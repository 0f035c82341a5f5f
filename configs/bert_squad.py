"""Fine-tune a BERT to find answers in a text: questions in SQuAD's JSON.

    transformers-jax train --config bert_squad --initial-checkpoint DIRECTORY --data.source train-v1.1.json

The checkpoint is a Hugging Face one (a directory, or a name on the hub) or a run's working directory; its tokenizer and
sizes replace what stands below. Questions without an answer (SQuAD 2.0) need --task.no-answer. For the English
part of XQuAD, the last fifth of its articles held out:

    transformers-jax train --config bert_squad --initial-checkpoint MiniLM-L6 --workdir runs/xquad \
        --data.source xquad.en.json --data.validation-fraction 0.2 --task.length 256 --task.overlap 64 \
        --training.epochs 5

Hardware: two CPU cores (AMD EPYC), about half an hour a seed on one of them. Result on its 220 questions from
MiniLM-L6, seeds 0, 1, 2: exact match 12.3, 10.5, 8.6 %, F1 19.8, 16.9, 16.0 %; the same recipe in PyTorch
(benchmarks/reference_bert.py): 9.5, 6.4, 12.7 % and 22.3, 11.9, 23.7 %.
"""

from transformers_jax.data import SpanData
from transformers_jax.experiment import Experiment
from transformers_jax.models import BertConfig
from transformers_jax.tasks import SpanExtraction
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=SpanExtraction(),
        model=BertConfig(vocab_size=None, max_length=384, dim=128, depth=2, heads=2),  # without a checkpoint
        data=SpanData(source="train-v1.1.json"),
        optimizer=OptimizerConfig(learning_rate=5e-5, schedule="linear", warmup_fraction=0.1, weight_decay=0.01),
        training=TrainingConfig(epochs=3, batch_size=32),
    )
