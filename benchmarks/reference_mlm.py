"""Pretraining a small BERT in PyTorch (transformers): the losses that configs/bert_mlm.py is held against.

    python benchmarks/reference_mlm.py

Text, tokenizer and masked batches are those of the config, read with our own pipeline: example for example what a run
with the same seed sees. Model and training are PyTorch's, with the config's numbers: transformers' `BertForMaskedLM`
with its own initial weights, dropout 0.1; AdamW 1e-3 with 10 % of the updates as warm-up, then linear to 0; decay 0.01
on matrices and embeddings only; gradients clipped to 1; float32. The held-out loss is over the config's fixed masks.
"""

import argparse
import statistics
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from transformers_jax.data import evaluation_batches, training_batches
from transformers_jax.experiment import Experiment, load_config
from transformers_jax.models import BertConfig


def make_model(config: BertConfig) -> transformers.BertForMaskedLM:
    assert config.vocab_size is not None  # the task has configured it
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.depth,
            num_attention_heads=config.heads,
            intermediate_size=config.mlp_dim or 4 * config.dim,
            max_position_embeddings=config.max_length,
            type_vocab_size=config.token_types,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.attention_dropout,
            layer_norm_eps=config.norm_epsilon,
            initializer_range=config.init_std,
            pad_token_id=config.pad_id,
        )
    )


def loss_of(model: transformers.BertForMaskedLM, batch: dict[str, np.ndarray]) -> tuple[Tensor, int]:
    """Sum of the losses of the hidden tokens, and their number. Only these are read out."""
    arrays = {name: torch.from_numpy(np.ascontiguousarray(array)).long() for name, array in batch.items()}
    hidden = model.bert(arrays["input_ids"], attention_mask=arrays["attention_mask"]).last_hidden_state
    hidden = hidden.gather(1, arrays["masked_positions"][..., None].expand(-1, -1, hidden.shape[-1]))
    labels = arrays["labels"].flatten()  # unused places have the label -100, which PyTorch leaves out
    return F.cross_entropy(model.cls(hidden).flatten(0, 1), labels, reduction="sum"), int((labels >= 0).sum())


@torch.inference_mode()
def evaluate(model: transformers.BertForMaskedLM, batches: Iterable[dict[str, np.ndarray]]) -> float:
    model.eval()
    losses, tokens = zip(*(loss_of(model, batch) for batch in batches), strict=True)
    model.train()
    return sum(loss.item() for loss in losses) / sum(tokens)


def learning_rate(update: int, updates: int, experiment: Experiment) -> float:
    warm_up = round((experiment.optimizer.warmup_fraction or 0.0) * updates)
    share = update / warm_up if update < warm_up else (updates - update) / (updates - warm_up)
    return experiment.optimizer.learning_rate * share


def train(experiment: Experiment, examples: Any, config: BertConfig, *, seed: int, updates: int, every: int) -> float:
    """The held-out loss after training."""
    recipe, batch_size = experiment.optimizer, experiment.training.batch_size
    torch.manual_seed(seed)
    model = make_model(config).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},  # biases and layer norms
    ]
    betas = (recipe.beta1, recipe.beta2 or 0.999)
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=betas, eps=recipe.epsilon)
    batches = training_batches(examples.train, batch_size=batch_size, seed=seed)
    begin, loss = time.perf_counter(), float("nan")
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update, updates, experiment)
        total, tokens = loss_of(model, {name: np.asarray(array) for name, array in next(batches).items()})
        optimizer.zero_grad()
        (total / tokens).backward()
        clip_grad_norm_(parameters, recipe.clip_norm or float("inf"))
        optimizer.step()
        if update == 0:
            print(f"seed {seed} update 1: {total.item() / tokens:.4f} nats a hidden token", flush=True)
        if (update + 1) % every == 0 or update + 1 == updates:
            loss = evaluate(model, evaluation_batches(examples.validation, batch_size=batch_size))
            print(f"seed {seed} update {update + 1}: held out {loss:.4f}, training {total.item() / tokens:.4f}, "
                  f"{time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bert_mlm", help="name or path of the config to follow")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="the config's unless given")
    parser.add_argument("--threads", type=int, help="PyTorch's own choice unless given")
    options = parser.parse_args()

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    experiment = load_config(options.config)
    updates = options.steps or experiment.training.steps
    losses = []
    for seed in options.seeds:
        examples = experiment.task.prepare(experiment.data, experiment.model, seed=seed)
        config: Any = experiment.task.configure(experiment.model, examples)
        if seed == options.seeds[0]:
            print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} "
                  f"threads; {examples.facts['text']}; ln(vocabulary) = {np.log(config.vocab_size):.4f}")  # fmt: skip
        every = experiment.training.eval_every or updates
        losses.append(train(experiment, examples, config, seed=seed, updates=updates, every=every))
    if len(losses) > 1:
        print(f"mean {statistics.mean(losses):.4f}, standard deviation {statistics.stdev(losses):.4f}")


if __name__ == "__main__":
    main()
