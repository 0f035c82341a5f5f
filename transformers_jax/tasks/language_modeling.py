"""Language modelling: predict the next token of running text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformers_jax.data import (
    Data,
    TextData,
    Tokenizer,
    document_end,
    evaluation_blocks,
    packed_documents,
    prepare_corpus,
    token_blocks,
)
from transformers_jax.generation import Sampling, generate
from transformers_jax.models import LanguageModel
from transformers_jax.tasks.base import Examples, Row, Task, abstract_arrays, text_length, with_tokenizer


@dataclass(frozen=True)
class LanguageModeling(Task):
    """Train a decoder on text; held-out text is scored token by token, each token once."""

    length: int | None = None
    """Tokens per example. None: the longest the model takes."""
    sampling: Literal["blocks", "windows", "documents"] = "blocks"
    """blocks: cut the text into pieces, each seen once an epoch. windows: a piece may begin at any token (nanoGPT).
    documents: whole documents, several short ones in a row, which do not see one another; the tokenizer needs a token
    that ends a text."""
    sample_prompt: str = "\n"
    """What the text printed after training starts from."""
    sample_tokens: int = 256
    """Tokens of text printed after training. 0: none."""
    sample_temperature: float = 0.8
    """Temperature of that text."""

    head: ClassVar = LanguageModel
    data: ClassVar = TextData

    def prepare(
        self, data: Data, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        if not isinstance(data, TextData):
            raise ValueError(f"language modelling reads TextData, not {type(data).__name__}")
        corpus = prepare_corpus(data, tokenizer=processor)
        length = text_length(self.length, config)
        facts = {
            "text": f"{data.source}: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out",
            "tokenizer": f"{data.tokenizer}, {corpus.tokenizer.vocab_size:,} tokens",
        }
        unseen_bytes = corpus.validation_first_bytes
        if self.sampling == "documents":
            separator, examples = document_end(corpus.tokenizer), None
            if training:
                rows = packed_documents(corpus.train, separator, length)
                examples, facts["rows"] = rows.dataset, rows.fact
            held_out, unseen_bytes = packed_documents(corpus.validation, separator, length).dataset, 0
        else:
            examples = token_blocks(corpus.train, length, sampling=self.sampling) if training else None
            held_out = evaluation_blocks(corpus.validation, length)
        return Examples(
            train=examples,
            validation=held_out,
            processor=corpus.tokenizer,
            fingerprint=corpus.fingerprint,
            items_per_example=length,
            facts=facts,
            extra={"bytes": corpus.validation_bytes - unseen_bytes},
        )

    def configure(self, config: Any, examples: Examples) -> Any:
        text_length(self.length, config)
        return with_tokenizer(config, examples.processor)

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        length = text_length(self.length, config)
        segments = {"segment_ids": [length]} if self.sampling == "documents" else {}
        return abstract_arrays(batch_size, input_ids=[length], labels=[length], **segments)

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats over the labels that are not -100, as (sum, number of labels)."""
        logits = model(batch["input_ids"], segment_ids=batch.get("segment_ids"), key=key).logits
        return cross_entropy(logits, batch["labels"])

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        loss, tokens = self.loss(model, batch)
        return {"loss": loss, "tokens": tokens}, {}

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Loss in nats a token, perplexity, and bits per byte of the predicted text."""
        loss = totals["loss"] / totals["tokens"]
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": totals["loss"] / math.log(2) / extra["bytes"],
            "tokens": totals["tokens"],
        }

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


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy in float32 over the labels that are not -100: (sum in nats, how many)."""
    scored = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), jnp.where(scored, labels, 0))
    return jnp.sum(jnp.where(scored, losses, 0.0)), jnp.sum(scored, dtype=jnp.float32)
