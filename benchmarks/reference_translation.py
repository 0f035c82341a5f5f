"""Training transformers' Marian in PyTorch: the figures that our translation models are held against.

    python benchmarks/reference_translation.py translate_multi30k --data.source train.de --data.target train.en \
        --data.validation-source val.de --data.validation-target val.en

Takes a config of ours and its options, as `transformers-jax train` does, and trains the same model on the same batches
of the same vocabulary with PyTorch's own optimizer and schedule: AdamW with decay on matrices and embeddings only, a
linear warm-up and then a cosine, clipped gradients, smoothed labels. After the last update, and every `--every` of
them, the whole held-out set is translated greedily and scored by sacreBLEU.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import sacrebleu
import torch
import transformers
from torch.nn.utils import clip_grad_norm_

from transformers_jax.arguments import parse
from transformers_jax.cli import Train
from transformers_jax.data import token_budget, training_batches
from transformers_jax.experiment import load_config

IGNORED = -100


def learning_rate(update: int, updates: int, optimizer: Any) -> float:
    """Of our `cosine` schedule, which is written down here a second time."""
    warm_up = round((optimizer.warmup_fraction or 0.0) * updates)
    if update < warm_up:
        return optimizer.learning_rate * update / warm_up
    progress = (update - warm_up) / (updates - warm_up)
    floor = optimizer.final_fraction
    return optimizer.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def make_model(config: Any) -> transformers.MarianMTModel:
    """A new Marian of the sizes of our configuration."""
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_length,
            d_model=config.dim,
            encoder_layers=config.depth,
            decoder_layers=config.decoder_depth or config.depth,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            encoder_ffn_dim=config.mlp_dim,
            decoder_ffn_dim=config.mlp_dim,
            activation_function={"silu": "swish"}.get(config.activation, config.activation),
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            activation_dropout=config.mlp_dropout,
            init_std=config.init_std,
            scale_embedding=config.scale_embedding,
            pad_token_id=config.pad_id,
            eos_token_id=config.eos_id,
            decoder_start_token_id=config.start,
            forced_eos_token_id=None,
        )
    )


@torch.inference_mode()
def translate(model: Any, examples: Any, tokenizer: Any, pad_id: int) -> list[str]:
    """Greedy translations of all held-out sources, in their order."""
    model.eval()
    rows = [torch.tensor(examples.validation.dataset[i]["input_ids"]) for i in range(len(examples.validation))]
    texts = [""] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for chosen in (order[i : i + 64] for i in range(0, len(order), 64)):
        ids = torch.nn.utils.rnn.pad_sequence([rows[i] for i in chosen], batch_first=True, padding_value=pad_id)
        written = model.generate(
            input_ids=ids,
            attention_mask=(ids != pad_id).long(),
            max_new_tokens=2 * ids.shape[1] + 16,
            num_beams=1,
            do_sample=False,
            bad_words_ids=[[pad_id]],
        )
        for i, row in zip(chosen, written[:, 1:].tolist(), strict=True):
            texts[i] = tokenizer.target.decode([id for id in row if id not in tokenizer.target.special_ids]).strip()
    return texts


def train(experiment: Any, seed: int, every: int) -> dict[str, float]:
    task, training, settings = experiment.task, experiment.training, experiment.optimizer
    examples = task.prepare(experiment.data, experiment.model, seed=seed)
    config, tokenizer = task.configure(experiment.model, examples), examples.processor
    cut = dict(batch_size=training.batch_size, batch_tokens=training.batch_tokens)
    budget = token_budget(examples.train, **cut)
    updates = training.resolved(len(examples.train), batches=budget.batches).steps
    torch.manual_seed(seed)
    model = make_model(config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.epsilon)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=task.label_smoothing, ignore_index=IGNORED)
    begin, losses, references = time.perf_counter(), [], [pair.target for pair in examples.extra["pairs"]]
    metrics: dict[str, float] = {}
    batches = training_batches(examples.train, seed=seed, num_threads=1, **cut)
    for update, arrays in zip(range(updates), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update, updates, settings)
        batch = {name: torch.tensor(array).long() for name, array in arrays.items()}
        labels = batch.pop("labels")
        before = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=config.start).clamp(min=0)
        model.train()
        logits = model(**batch, decoder_input_ids=before, use_cache=False).logits
        loss = criterion(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(parameters, settings.clip_norm)
        optimizer.step()
        losses.append(loss.item())
        if update + 1 == updates or (every and (update + 1) % every == 0):
            written = translate(model, examples, tokenizer, config.pad_id)
            score = sacrebleu.corpus_bleu(written, [references]).score
            chrf = sacrebleu.corpus_chrf(written, [references]).score
            metrics = {"bleu": score, "chrf": chrf, "loss": statistics.mean(losses[-50:])}
            metrics |= {"update": update + 1, "updates": updates, "seconds": time.perf_counter() - begin}
            print(f"seed {seed}: {json.dumps({name: round(value, 4) for name, value in metrics.items()})}", flush=True)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config of ours")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=0, help="updates between evaluations; 0 is at the end only")
    parser.add_argument("--threads", type=int, help="PyTorch's own choice unless given")
    parser.add_argument("--json", type=Path, help="append one line of JSON per seed to this file")
    options, rest = parser.parse_known_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    default = Train(config=options.config, experiment=load_config(options.config))
    experiment = parse(Train, ["--config", options.config, *rest], "train", default).experiment
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    found = []
    for seed in options.seeds:
        found.append(train(experiment, seed, options.every))
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"seed": seed} | found[-1]) + "\n")
    if len(found) > 1:
        values = [metrics["bleu"] for metrics in found]
        print(f"bleu: mean {statistics.mean(values):.4g}, standard deviation {statistics.stdev(values):.3g}")


if __name__ == "__main__":
    main()
