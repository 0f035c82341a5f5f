"""Fine-tune a BERT for named entities: a tag for each word of a CoNLL column file.

    transformers-jax train --config bert_ner --initial-checkpoint DIRECTORY --data.source train.conll

The checkpoint is a Hugging Face one (a directory, or a name on the hub) or a run's working directory; its tokenizer and
sizes replace what stands below. For WNUT-17:

    transformers-jax train --config bert_ner --initial-checkpoint MiniLM-L6 --workdir runs/wnut17 \
        --data.source wnut17train.conll --data.validation-source emerging.dev.conll

Hardware: two CPU cores (AMD EPYC). Entity F1 on the whole dev set after the last epoch, from seeds 0, 1, 2:
53.3, 51.7, 53.5 %; with `--training.group-by-length 16`: 52.6, 49.7, 50.8 %. The same recipe in PyTorch
(benchmarks/reference_bert.py): 52.4, 52.9, 53.4 %.
"""

from transformers_jax.data import EntityData
from transformers_jax.experiment import Experiment
from transformers_jax.models import BertConfig
from transformers_jax.tasks import TokenClassification
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=TokenClassification(length=128),
        model=BertConfig(vocab_size=None, max_length=128, dim=128, depth=2, heads=2),  # without a checkpoint
        data=EntityData(source="train.conll"),
        optimizer=OptimizerConfig(learning_rate=5e-5, schedule="linear", warmup_fraction=0.1, weight_decay=0.01),
        # Batches as they are drawn: a loss over tokens learns worse from rows that are grouped by length.
        training=TrainingConfig(epochs=5, batch_size=32, group_by_length=1),
    )
