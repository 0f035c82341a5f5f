"""What the tests of the tasks share: a tiny BERT, and a model that says what it is told to."""

import jax.numpy as jnp
from flax import nnx

from transformers_jax.data import Tokenizer
from transformers_jax.experiment import Experiment
from transformers_jax.models import BertConfig
from transformers_jax.models.output import ModelOutput
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.mesh import MeshConfig
from transformers_jax.training.optimizer import OptimizerConfig

CONFIG = BertConfig(vocab_size=None, max_length=48, dim=32, depth=1, heads=2, dropout=0.0, attention_dropout=0.0)


class Lookup(nnx.Module):
    """The logits of a token are a row of `table`; with `pooled`, those of a text are its second token's."""

    def __init__(self, table, config=CONFIG, *, pooled=False):
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))
        self.config = config
        self.pooled = pooled

    def __call__(self, input_ids, attention_mask=None, *, key=None, token_type_ids=None):
        logits = self.table[...][input_ids]
        return ModelOutput(hidden=logits, logits=logits[:, 1] if self.pooled else logits)


def whole_words(tmp_path, *words):
    """A file with a WordPiece vocabulary of these words, lower-cased without accents, and of nothing else."""
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n", encoding="utf-8")
    return str(path)


def tokenizer_of(tmp_path, *words):
    return Tokenizer.load(whole_words(tmp_path, *words))


def training(task, data, *, steps=150, batch_size=16, learning_rate=3e-3, seed=0, model=CONFIG, **fields):
    """An experiment that trains the tiny BERT in a few seconds."""
    return Experiment(
        task=task,
        model=model,
        data=data,
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=10),
        training=TrainingConfig(
            steps=steps, batch_size=batch_size, log_every=steps, eval_every=steps, checkpoint_every=steps
        ),
        mesh=MeshConfig(devices=1),
        seed=seed,
        **fields,
    )
