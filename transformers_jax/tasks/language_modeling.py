"""Language modelling: predict the next token of running text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from transformers_jax.data import Data, TextData, Tokenizer, evaluation_blocks, prepare_corpus, token_blocks
from transformers_jax.generation import Sampling, generate
from transformers_jax.models import LanguageModel
from transformers_jax.tasks.base import Examples, Task


@dataclass(frozen=True)
class LanguageModeling(Task):
    """Train a decoder on text; held-out text is scored token by token, each token once."""

    length: int | None = None
    """Tokens per example. None: the longest the model takes."""
    sampling: Literal["blocks", "windows"] = "blocks"
    """blocks: cut the text into pieces, each seen once an epoch. windows: a piece may begin at any token (nanoGPT)."""
    sample_prompt: str = "\n"
    """What the text printed after training starts from."""
    sample_tokens: int = 256
    """Tokens of text printed after training. 0: none."""
    sample_temperature: float = 0.8
    """Temperature of that text."""

    def prepare(self, data: Data, config: Any, processor: Any = None, *, training: bool = True) -> Examples:
        if not isinstance(data, TextData):
            raise ValueError(f"language modelling reads TextData, not {type(data).__name__}")
        corpus = prepare_corpus(data, tokenizer=processor)
        length = self._length(config)
        return Examples(
            train=token_blocks(corpus.train, length, sampling=self.sampling) if training else None,
            validation=evaluation_blocks(corpus.validation, length),
            processor=corpus.tokenizer,
            fingerprint=corpus.fingerprint,
            facts={
                "text": f"{data.source}: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out",
                "tokenizer": f"{data.tokenizer}, {corpus.tokenizer.vocab_size:,} tokens",
            },
            extra={"bytes": corpus.validation_bytes - corpus.validation_first_bytes},
        )

    def configure(self, config: Any, processor: Any) -> Any:
        size, limit = processor.vocab_size, config.vocab_size
        if limit is not None and size > limit:
            raise ValueError(
                f"the tokenizer has {size} tokens but model.vocab_size is {limit}; "
                f"raise it, or set it to None to take the tokenizer's"
            )
        self._length(config)
        return replace(
            config,
            vocab_size=size if limit is None else limit,
            bos_id=processor.bos_id,
            eos_id=processor.eos_id,
            pad_id=processor.pad_id,
        )

    def build(self, config: Any, *, rngs: nnx.Rngs) -> LanguageModel:
        return LanguageModel(config.build(rngs=rngs), rngs=rngs)

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats over the labels that are not -100, as (sum, number of labels)."""
        logits = model(batch["input_ids"], key=key).logits
        return cross_entropy(logits, batch["labels"])

    def metric_sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        loss, tokens = self.loss(model, batch)
        return {"loss": loss, "tokens": tokens}

    def finish(self, totals: Mapping[str, float], extra: Mapping[str, Any]) -> dict[str, float]:
        """Loss in nats a token, perplexity, and bits per byte of the predicted text."""
        loss = totals["loss"] / totals["tokens"]
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": totals["loss"] / math.log(2) / extra["bytes"],
            "tokens": totals["tokens"],
        }

    def items_per_example(self, config: Any) -> int:
        return self._length(config)

    def sample(self, model: Any, processor: Any, *, seed: int = 0) -> str | None:
        """Text that the model writes after `sample_prompt`."""
        if self.sample_tokens == 0:
            return None
        tokenizer: Tokenizer = processor
        try:
            prompt = tokenizer.encode(self.sample_prompt)
        except ValueError:  # the prompt has a character that the training text does not have
            prompt = []
        limit = model.config.max_length
        prompt = prompt[: limit // 2] or [0 if tokenizer.eos_id is None else tokenizer.eos_id]
        room = min(self.sample_tokens, limit - len(prompt))
        output = generate(
            model,
            np.asarray([prompt], np.int32),
            max_new_tokens=room,
            sampling=Sampling(temperature=self.sample_temperature),
            key=jax.random.key(seed),
        )
        return tokenizer.decode([*prompt, *np.asarray(output.tokens)[0, : int(output.lengths[0])].tolist()])

    def _length(self, config: Any) -> int:
        length = config.max_length if self.length is None else self.length
        if not 1 <= length <= config.max_length:
            raise ValueError(f"task.length={length} must be between 1 and model.max_length={config.max_length}")
        return length


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy in float32 over the labels that are not -100: (sum in nats, how many)."""
    scored = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), jnp.where(scored, labels, 0))
    return jnp.sum(jnp.where(scored, losses, 0.0)), jnp.sum(scored, dtype=jnp.float32)
