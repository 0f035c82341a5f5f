"""GPT-3 175B (Brown et al. 2020, table 2.1 and appendix B): 300 B tokens in batches of 3.2 M.
"""

from transformers_jax.data import TextData
from transformers_jax.experiment import Experiment
from transformers_jax.models import GPTConfig
from transformers_jax.tasks import LanguageModeling
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.mesh import MeshConfig
from transformers_jax.training.optimizer import OptimizerConfig


def experiment() -> Experiment:
    return Experiment(
        task=LanguageModeling(),
        model=GPTConfig.gpt3_175b(
            dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0, dtype="bfloat16", remat="full"
        ),
        data=TextData(source="corpus/*.jsonl", tokenizer="gpt2"),
        optimizer=OptimizerConfig(
            learning_rate=0.6e-4,
            warmup_steps=119,  # 375 M tokens
            final_fraction=0.1,
            beta2=0.95,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        training=TrainingConfig(
            steps=95_367, batch_size=1536, accumulation=3, log_every=10, eval_every=1000, checkpoint_every=500
        ),
        mesh=MeshConfig(fsdp=256),
    )
