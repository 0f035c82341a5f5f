"""GPT-3 175B (Brown et al. 2020, table 2.1 and appendix B): 300 B tokens in batches of 3.1 M, on 256 devices of 80 GB.

    transformers-jax plan --config configs/gpt3_175b.py --chip h100

Planned and compiled, not run. The plan: 174.6 B parameters; 31.8 GB a device of 80 GB (parameters and gradients 2.8 GB
each, optimizer 5.6 GB, activations 20.6 GB with a fused kernel for attention); 4.15e18 FLOPs a step in matrix products;
40.9 s a step and 45 days in all at 40 % of an H100's peak. The step compiles for 256 simulated devices in 40 s on two
busy CPU cores, without a warning of XLA about its layout.

The paper's batch grows over the first 12 B tokens and its learning rate falls over 260 B, then stays; here the batch is
the final one from the start, and the cosine takes the whole run.
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
