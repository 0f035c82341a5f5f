"""Masked language modelling: predict hidden tokens from the text on both sides (BERT's pretraining)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformers_jax.data import (
    Data,
    Masking,
    Packed,
    SentencePairs,
    Template,
    TextData,
    Tokenizer,
    document_end,
    masked_tokens,
    packed_texts,
    prepare_corpus,
    text_blocks,
)
from transformers_jax.models import MaskedLanguageModel
from transformers_jax.tasks.base import (
    Examples,
    Features,
    Row,
    Task,
    abstract_arrays,
    model_inputs,
    ragged,
    text_length,
    with_tokenizer,
)
from transformers_jax.tasks.language_modeling import cross_entropy

EVALUATION_SEED = 0
"""Of the masks of held-out text: the same in every run."""
SHOWN = 5
"""Tokens given for each mask of a prediction."""


@dataclass(frozen=True)
class MaskedLM(Task):
    """Train an encoder to restore hidden tokens (Devlin et al. 2019).

    Text is cut into blocks of `length` tokens, the special ones at both ends included; the last block is filled up with
    padding. A new set of tokens is hidden every epoch, as `data.Masking` describes; what is hidden of held-out text is
    always the same.
    """

    length: int | None = None
    """Tokens per example, special ones included. None: the longest the model takes."""
    mask_rate: float = 0.15
    """The share of the tokens of an example that are hidden and predicted."""
    mask_share: float = 0.8
    """The share of these that the mask token replaces."""
    random_share: float = 0.1
    """The share of these that a random token replaces. The rest stay as they are."""
    whole_word: bool = False
    """Hide all pieces of a word together. Needs a WordPiece tokenizer."""
    pack: bool = False
    """Instead of blocks cut through the text, whole documents, several short ones in a row, which do not see one
    another."""
    next_sentence: bool = False
    """Also learn to tell whether one segment follows another in a document, or is from elsewhere. Needs documents."""
    sample_text: str | None = None
    """Text with mask tokens, such as 'the [MASK] statement', that is filled in after training."""

    head: ClassVar = MaskedLanguageModel
    data: ClassVar = TextData

    def __post_init__(self):
        for name in ("mask_rate", "mask_share", "random_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"task.{name}={getattr(self, name)} must be between 0 and 1")
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"task.mask_share={self.mask_share} and task.random_share={self.random_share} are more than 1 together"
            )
        if self.pack and self.next_sentence:
            raise ValueError("task.pack and task.next_sentence do not go together: pairs fill their rows")

    def prepare(
        self, data: Data, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        if not isinstance(data, TextData):
            raise ValueError(f"masked language modelling reads TextData, not {type(data).__name__}")
        length = text_length(self.length, config)
        if training and self.mask_rate == 0 and not self.next_sentence:
            raise ValueError("task.mask_rate=0 hides nothing, so there is nothing to learn; raise it")
        corpus = prepare_corpus(data, tokenizer=processor)
        tokenizer = corpus.tokenizer

        if training and self.sample_text is not None:
            try:
                self.features([self.sample_text], tokenizer, config)
            except ValueError as error:
                raise ValueError(f"task.sample_text: {error}") from None

        def examples(tokens: np.ndarray, seed: int, name: str, rows: Packed | None = None) -> grain.MapDataset:
            return self.examples(tokens, tokenizer, length, seed=seed, name=name, rows=rows)

        rows = None
        if self.pack and training:
            rows = packed_texts(corpus.train, tokenizer, document_end(tokenizer), length)
        held_out = examples(corpus.validation, EVALUATION_SEED, "held-out text")
        return Examples(
            train=examples(corpus.train, seed, "text", rows) if training else None,
            validation=held_out,
            processor=tokenizer,
            fingerprint=corpus.fingerprint,
            items_per_example=length,
            facts={
                "text": f"{data.source}: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out "
                f"({len(held_out):,} examples)",
                "tokenizer": f"{data.tokenizer}, {tokenizer.vocab_size:,} tokens",
                **({"rows": rows.fact} if rows is not None else {}),
            },
        )

    def examples(
        self,
        tokens: np.ndarray,
        tokenizer: Tokenizer,
        length: int,
        *,
        seed: int,
        name: str = "text",
        rows: Packed | None = None,
    ) -> grain.MapDataset:
        """The tokens of a corpus as masked examples of `length` tokens: `input_ids`, `attention_mask`,
        `masked_positions` and `labels`, with the next-sentence objective also `token_type_ids` and
        `next_sentence_label`; of packed documents `segment_ids` for the mask. `rows` are these, if they were packed
        before.

        What is hidden, and how segments are paired, is decided by `seed`, the number of the example and the epoch
        alone. `name` is what errors call the text.
        """
        room = Template.of(tokenizer, texts=2 if self.next_sentence else 1).room(length)
        masking = Masking(
            tokenizer,
            slots=max(1, masked_tokens(self.mask_rate, room)),
            rate=self.mask_rate,
            mask_share=self.mask_share,
            random_share=self.random_share,
            whole_words=self.whole_word,
        )
        if self.pack:
            rows = rows or packed_texts(tokens, tokenizer, document_end(tokenizer), length)
            return rows.dataset.random_map(masking, seed=seed)
        if not self.next_sentence:
            return text_blocks(tokens, tokenizer, length).random_map(masking, seed=seed)
        pairs = SentencePairs(tokens, tokenizer, length, name=name)
        return grain.MapDataset.range(len(pairs)).random_map(
            lambda index, rng: masking(pairs.draw(index, rng), rng), seed=seed
        )

    def configure(self, config: Any, examples: Examples) -> Any:
        if not hasattr(config, "next_sentence"):
            raise ValueError(f"masked language modelling needs an encoder such as BERT, not a {type(config).__name__}")
        if self.next_sentence and config.token_types < 2:
            raise ValueError(
                f"task.next_sentence needs a model that tells two segments apart, but model.token_types is "
                f"{config.token_types}"
            )
        text_length(self.length, config)
        return with_tokenizer(config, examples.processor, next_sentence=self.next_sentence)

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        length = text_length(self.length, config)
        segments = dict(token_type_ids=[length], next_sentence_label=[]) if self.next_sentence else {}
        slots = max(1, masked_tokens(self.mask_rate, length - (3 if self.next_sentence else 2)))  # [CLS] and [SEP]s
        mask = "segment_ids" if self.pack else "attention_mask"
        texts = {"input_ids": [length], mask: [length], "masked_positions": [slots], "labels": [slots]}
        return abstract_arrays(batch_size, **texts, **segments)

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats over the hidden tokens, as (sum, number of them).

        With the next-sentence objective, its loss of each example is added once for each hidden token of it: divided,
        this is the mean over hidden tokens plus a mean over examples, in which an example weighs as much as it has
        hidden tokens (equal for examples of equal length: the paper's sum of two means). An example without any counts
        as one token. The division comes last, so neither micro-batches nor devices change the result.
        """
        output = model(**model_inputs(model.config, batch), masked_positions=batch["masked_positions"], key=key)
        loss, weight = cross_entropy(output.logits, batch["labels"])
        if not self.next_sentence:
            return loss, weight
        weights = jnp.maximum(jnp.sum(batch["labels"] >= 0, axis=-1), 1).astype(jnp.float32)
        return loss + jnp.sum(weights * _next_sentence_losses(output, batch)), jnp.sum(weights)

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        output = model(**model_inputs(model.config, batch), masked_positions=batch["masked_positions"])
        labels = batch["labels"]
        loss, tokens = cross_entropy(output.logits, labels)
        right = jnp.sum((labels >= 0) & (output.logits.argmax(-1) == labels), dtype=jnp.float32)
        rows = {}
        if self.next_sentence:
            rows = {
                "next_sentence_loss": _next_sentence_losses(output, batch),
                "next_sentence_accuracy": output.next_sentence_logits.argmax(-1) == batch["next_sentence_label"],
            }
        return {"loss": loss, "right": right, "tokens": tokens}, rows

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Loss in nats (the sum of both objectives), perplexity and accuracy of the hidden tokens, their number, and
        with the next-sentence objective the loss of each (`masked_loss`, `next_sentence_loss`) and its accuracy."""
        tokens = max(totals["tokens"], 1.0)  # a rate of 0 hides nothing
        loss = totals["loss"] / tokens
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "accuracy": totals["right"] / tokens,
            "tokens": totals["tokens"],
        }
        if not self.next_sentence:
            return metrics
        names = ("next_sentence_loss", "next_sentence_accuracy")
        of_pairs = {name: float(np.mean([row[name] for row in rows], dtype=np.float64)) for name in names}
        return metrics | {"loss": loss + of_pairs["next_sentence_loss"], "masked_loss": loss} | of_pairs

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        _read_input(value, _mask_token(processor), where)

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Texts, or dictionaries with "text", with the mask token written in them."""
        tokenizer: Tokenizer = processor
        mask = _mask_token(tokenizer)
        template, length = Template.of(tokenizer), text_length(self.length, config)
        room, begin = template.room(length), len(template.specials[0])
        texts = [_read_input(value, mask, f"input {i}") for i, value in enumerate(inputs)]
        encoded, positions = [], []
        for i, parts in enumerate(texts):
            # Blanks before a mask belong to the word that is hidden (byte-level tokens begin with them).
            pieces = tokenizer.encode_batch([*(part.rstrip() for part in parts[:-1]), parts[-1]])
            ids = np.array(pieces[0] + [i for piece in pieces[1:] for i in (tokenizer.mask_id, *piece)], np.int32)
            if len(ids) > room:
                raise ValueError(f"input {i} has {len(ids)} tokens, but at most {room} fit; shorten it")
            encoded.append(template.fill(ids))
            # Text never becomes a special token, so that these are the masks.
            positions.append(begin + np.flatnonzero(ids == tokenizer.mask_id))
        most = max(map(len, positions))
        examples = [
            example | {"masked_positions": np.pad(places, (0, most - len(places))).astype(np.int32)}
            for example, places in zip(encoded, positions, strict=True)
        ]
        return Features(ragged(examples, tokenizer, length), {"texts": texts, "tokenizer": tokenizer})

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        logits = model(**model_inputs(model.config, batch), masked_positions=batch["masked_positions"]).logits
        probabilities, ids = jax.lax.top_k(jax.nn.softmax(logits), min(SHOWN, logits.shape[-1]))
        return {"ids": ids, "probabilities": probabilities}

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """`{"tokens": [[{"token", "probability"}, ...], ...], "text"}`: for each mask the most probable tokens, best
        first, and the text with the best of each filled in."""
        tokenizer: Tokenizer = features.extra["tokenizer"]
        predictions = []
        for row, parts in zip(rows, features.extra["texts"], strict=True):
            tokens, text = [], parts[0]
            for ids, probabilities, part in zip(row["ids"], row["probabilities"], parts[1:], strict=False):
                pairs = zip(map(tokenizer.decode, ids[:, None]), probabilities, strict=True)
                tokens.append([{"token": token, "probability": round(float(p), 6)} for token, p in pairs])
                text = _filled_in(text, tokenizer, int(ids[0])) + part
            predictions.append({"tokens": tokens, "text": text})
        return predictions

    def sample(self, model: Any, processor: Any, *, seed: int = 0) -> str | None:
        """`sample_text` as the model fills it in, and what else it holds for probable."""
        if self.sample_text is None:
            return None
        prediction = self.predict_one(model, self.sample_text, processor)
        probable = (
            ", ".join(f"{one['token']} {one['probability']:.2f}" for one in tokens) for tokens in prediction["tokens"]
        )
        return "\n".join([prediction["text"], *probable])


def _next_sentence_losses(output: Any, batch: Any) -> jax.Array:
    """(batch,), in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(output.next_sentence_logits, batch["next_sentence_label"])


def _mask_token(tokenizer: Tokenizer) -> str:
    if tokenizer.mask_id is None:
        raise ValueError("the tokenizer has no mask token")
    return str(tokenizer.backend.id_to_token(tokenizer.mask_id))


def _read_input(value: Any, mask: str, where: str) -> list[str]:
    """The text between the masks."""
    match value:
        case (str() as text) | {"text": str() as text}:
            pass
        case _:
            raise ValueError(f'{where} is {value!r:.60}, not a text or {{"text": ...}}')
    if mask not in text:
        raise ValueError(f"{where} has no {mask} to fill in: {text!r:.60}")
    return text.split(mask)


def _filled_in(text: str, tokenizer: Tokenizer, token_id: int) -> str:
    """`text` and, as its last word or part of it, a token."""
    token, starts = tokenizer.decode([token_id]), tokenizer.word_starts
    if starts is None:  # byte-level: the blank is part of the token
        return text.rstrip() + token if text.strip() else token.lstrip()
    if token_id < len(starts) and not starts[token_id]:
        return text.rstrip() + token.removeprefix("##")
    return text + token
