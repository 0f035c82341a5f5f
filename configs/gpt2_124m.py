"""GPT-2 124M from scratch on a corpus like OpenWebText, bfloat16, eight devices, about 0.5 M tokens a step.

    python train.py --config configs/gpt2_124m.py --data.source 'openwebtext/*.jsonl' --data.tokenizer DIR

DIR holds GPT-2's tokenizer (`vocab.json` and `merges.txt`, or `tokenizer.json`). Hardware: eight GPUs or TPUs with
40 GB or more. Not run by us yet: nanoGPT reports a validation loss of about 2.85 with this recipe after four days on
eight A100s. `--training.batch-size` and `--training.accumulation` fit it to other machines.
"""

from transformers_jax.data import TextData
from transformers_jax.experiment import Experiment
from transformers_jax.models import GPTConfig
from transformers_jax.tasks import LanguageModeling
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=LanguageModeling(),
        model=GPTConfig.gpt2(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0, dtype="bfloat16"),
        data=TextData(source="openwebtext/*.jsonl", tokenizer="gpt2", validation_fraction=0.0005),
        optimizer=OptimizerConfig(
            learning_rate=6e-4, warmup_steps=2000, final_fraction=0.1, beta2=0.95, weight_decay=0.1, clip_norm=1.0
        ),
        training=TrainingConfig(
            steps=600_000, batch_size=480, accumulation=5, log_every=10, eval_every=1000, checkpoint_every=1000
        ),
    )
