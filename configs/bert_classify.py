"""Fine-tune a BERT for text classification: one label for each text of a table.

    transformers-jax train --config bert_classify --initial-checkpoint DIRECTORY --data.source train.tsv

The checkpoint is a Hugging Face one (a directory, or a name on the hub) or a run's working directory; its tokenizer and
sizes replace what stands below. The columns are called `text` and `label`; for SST-2, whose tables have no header:

    transformers-jax train --config bert_classify --initial-checkpoint MiniLM-L6 --workdir runs/sst2 \
        --data.source sst2/train.tsv --data.validation-source sst2/dev.tsv --data.text-column 0 --data.label-column 1

Hardware: two CPU cores (AMD EPYC), about a quarter of an hour a seed on one of them. Accuracy on the whole dev set
after the last epoch, from seeds 0, 1, 2: 88.5, 88.1, 88.6 %; the same recipe in PyTorch
(benchmarks/reference_bert.py): 87.4 % on average, with a standard deviation of 0.3.
"""

from transformers_jax.data import ClassificationData
from transformers_jax.experiment import Experiment
from transformers_jax.models import BertConfig
from transformers_jax.tasks import TextClassification
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=TextClassification(length=128),
        model=BertConfig(vocab_size=None, max_length=128, dim=128, depth=2, heads=2),  # without a checkpoint
        data=ClassificationData(source="train.tsv"),
        optimizer=OptimizerConfig(learning_rate=5e-5, schedule="linear", warmup_fraction=0.1, weight_decay=0.01),
        training=TrainingConfig(epochs=3, batch_size=32),
    )
