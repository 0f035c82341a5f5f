"""Translation: a text into a text, by an encoder-decoder."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex

import grain
import jax
import jax.numpy as jnp
import numpy as np

from transformers_jax.data import (
    IGNORED_LABEL,
    Ragged,
    SentencePair,
    Tokenizer,
    TranslationData,
    read_pairs,
)
from transformers_jax.data.encoding import Template
from transformers_jax.data.labelled import warn_once
from transformers_jax.generation import Sampling, beam_search, generate
from transformers_jax.models import Seq2SeqLanguageModel
from transformers_jax.tasks.base import (
    Examples,
    Features,
    Row,
    Task,
    abstract_arrays,
    text_length,
    tokenizer_fact,
    with_tokenizer,
)
from transformers_jax.tasks.language_modeling import cross_entropy
from transformers_jax.tasks.metrics import need, translation_metrics, translation_rule
from transformers_jax.tasks.reports import write_jsonl

UNLIMITED = 512
"""Longest text in tokens where neither the task nor the model has a limit (T5)."""


@dataclass(frozen=True)
class Translation(Task):
    """Train an encoder-decoder to write the translation of a text (or its summary: any text that follows from one)."""

    length: int | None = None
    """Longest source and target in tokens, the one that ends them included. Longer pairs are not trained on, longer
    sources to translate are cut. None: the longest that the model takes."""
    label_smoothing: float = 0.1
    """Share of the target that is spread evenly over the whole vocabulary."""
    prefix: str = ""
    """What every source begins with, such as T5's 'translate English to German: '."""
    beams: int = 1
    """Beams of the search for translations, in evaluations too. 1: the likeliest token at each step (greedy)."""
    n_best: int = 1
    """How many translations a prediction holds, at most as many as there are beams."""
    length_penalty: float = 1.0
    """A translation's score is its log-probability divided by its length to this power."""
    early_stopping: bool = False
    """Whether the search ends as soon as it has as many translations as beams."""
    bleu_tokenize: str | None = None
    """sacreBLEU's tokenizer of words: 13a, intl, zh, ja-mecab, char ... None: its default, 13a."""
    sample_text: str | None = None
    """A text that is translated after training, to be looked at."""

    head: ClassVar = Seq2SeqLanguageModel
    data: ClassVar = TranslationData

    def __post_init__(self):
        if self.length is not None and self.length < 1:
            raise ValueError(f"task.length={self.length} must be at least 1")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        if self.beams < 1 or not 1 <= self.n_best <= self.beams:
            raise ValueError(f"task.n_best={self.n_best} must be between 1 and task.beams={self.beams}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"task.length_penalty={self.length_penalty} must be finite")

    @property
    def metric(self) -> str:
        return "bleu"

    def prepare(
        self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        if not isinstance(data, TranslationData):
            raise ValueError(f"translation reads TranslationData, not {type(data).__name__}")
        translation_metrics([""], [""], self.bleu_tokenize)  # an extra that is missing, or a wrong name, shows now
        length = self._length(config)
        held_out = read_pairs(data, part="validation")
        train = read_pairs(data, part="train")
        tokenizer: Tokenizer = processor or _make_tokenizer(data, train)
        facts = {}
        pairs = self._encode(train, tokenizer) if training else None
        if pairs is not None:
            all_of_them = len(pairs)
            pairs = pairs.no_longer_than(length)
            if not len(pairs):
                raise ValueError(f"{data.source}: all {all_of_them:,} pairs are longer than {length} tokens")
            mean = np.diff(pairs.places, axis=-1).mean(axis=(1, 2))
            facts["pairs"] = (
                f"{data.source}: {len(pairs):,} to train on ({all_of_them - len(pairs):,} longer than {length} tokens "
                f"left out), {len(held_out):,} held out, {mean[0]:.0f} and {mean[1]:.0f} tokens on average"
            )
        scored = self._encode(held_out, tokenizer)
        if cut := int(np.sum(scored.lengths > length)):
            warn_once(f"{cut:,} of {len(scored):,} held-out pairs are longer than {length} tokens and are cut there")
        facts["tokenizer"] = tokenizer_fact(data, tokenizer, given=processor is not None)
        return Examples(
            train=None if pairs is None else pairs.ragged(tokenizer, length),
            validation=scored.ragged(tokenizer, length),
            processor=tokenizer,
            fingerprint=_fingerprint([train, held_out], self.prefix),
            items_per_example=max(1, round(float(np.mean(np.diff(scored.places[1], axis=1))))),
            facts=facts,
            extra={"pairs": held_out, "tokenizer": tokenizer},
        )

    def _length(self, config: Any) -> int:
        if config.max_length is None:
            return self.length or UNLIMITED
        return text_length(self.length, config)

    def _encode(self, pairs: Sequence[SentencePair], tokenizer: Tokenizer) -> "_Pairs":
        sources = tokenizer.encode_arrays([self.prefix + pair.source for pair in pairs])
        targets = tokenizer.target.encode_arrays([pair.target for pair in pairs])
        return _Pairs.of((sources, targets), (_frame(tokenizer), _frame(tokenizer.target)))

    def configure(self, config: Any, examples: Examples) -> Any:
        if not hasattr(config, "target_vocab_size"):
            raise ValueError(f"translation needs an encoder-decoder, not a {type(config).__name__}")
        self._length(config)
        tokenizer, limit = examples.processor, config.target_vocab_size
        if limit is not None and (size := tokenizer.target.vocab_size) > limit:
            raise ValueError(f"the target's tokenizer has {size} tokens but model.target_vocab_size is {limit}")
        return with_tokenizer(config, tokenizer)

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        length = self._length(config)
        return abstract_arrays(batch_size, input_ids=[length], attention_mask=[length], labels=[length])

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats over the target's tokens, with smoothed labels, as (sum, number of tokens)."""
        logits, labels = self._logits(model, batch, key), batch["labels"]
        loss, tokens = cross_entropy(logits, labels)
        if not self.label_smoothing:
            return loss, tokens
        logits = logits.astype(jnp.float32)
        spread = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)  # the mean loss over the vocabulary
        spread = jnp.sum(jnp.where(labels >= 0, spread, 0.0))
        return (1 - self.label_smoothing) * loss + self.label_smoothing * spread, tokens

    def _logits(self, model: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        labels = batch["labels"]
        before = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=model.config.start)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return model(**inputs, decoder_input_ids=jnp.maximum(before, 0), key=key).logits

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        loss, tokens = cross_entropy(self._logits(model, batch, None), batch["labels"])
        return {"loss": loss, "tokens": tokens}, self._write(model, batch, 1)

    def _write(self, model: Any, batch: Any, n_best: int) -> dict[str, Any]:
        """The best translations of each row: `tokens` (batch, n_best, most), their `lengths` and `scores`."""
        config = model.config
        rows, length = batch["input_ids"].shape
        most = 2 * length + 16 if config.max_length is None else min(2 * length + 16, config.max_length - 1)
        stop_ids = config.eos_id if isinstance(config.eos_id, tuple) else (config.eos_id,)
        writer = model.condition(batch["input_ids"], batch["attention_mask"])
        prompts = np.full((rows, 1), config.start, np.int32)
        # Padding is never learned as a target, so what a model says of it means nothing.
        suppressed = () if config.pad_id is None or config.pad_id in stop_ids else (config.pad_id,)
        if self.beams == 1:
            greedy = Sampling(temperature=0, suppress_ids=suppressed)
            output = generate(writer, prompts, max_new_tokens=most, sampling=greedy, stop_ids=stop_ids)
            scores = jnp.sum(output.log_probs, axis=1) / output.lengths.astype(jnp.float32) ** self.length_penalty
            return {"tokens": output.tokens[:, None], "lengths": output.lengths[:, None], "scores": scores[:, None]}
        found = beam_search(
            writer,
            prompts,
            beams=self.beams,
            max_new_tokens=most,
            num_return_sequences=n_best,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            suppress_ids=suppressed,
            stop_ids=stop_ids,
        )
        return {"tokens": found.tokens, "lengths": found.lengths, "scores": found.scores}

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Loss in nats a token (without smoothing) and perplexity, sacreBLEU's BLEU and chrF of the whole set, and the
        number of sentences."""
        loss = totals["loss"] / totals["tokens"]
        written = [texts[0] for texts in _texts(rows, extra["tokenizer"])]
        references = [pair.target for pair in extra["pairs"]]
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            **translation_metrics(written, references, self.bleu_tokenize),
            "sentences": float(len(references)),
        }

    def scoring_rule(self) -> str:
        return translation_rule(self.bleu_tokenize)

    def report(self, rows: Sequence[Row], extra: Mapping[str, Any], config: Any, directory: Path) -> list[Path]:
        """`translations.jsonl`: source, reference, translation and sacreBLEU's sentence BLEU, worst first."""
        bleu = need("sacrebleu").sentence_bleu
        options = {} if self.bleu_tokenize is None else {"tokenize": self.bleu_tokenize}
        lines = []
        for pair, (text, *_) in zip(extra["pairs"], _texts(rows, extra["tokenizer"]), strict=True):
            score = round(bleu(text, [pair.target], **options).score, 2)
            lines.append({"source": pair.source, "reference": pair.target, "translation": text, "bleu": score})
        directory.mkdir(parents=True, exist_ok=True)
        write_jsonl(directory / "translations.jsonl", sorted(lines, key=lambda line: line["bleu"]))
        return [directory / "translations.jsonl"]

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        _read_input(value, where)

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Texts, or dictionaries with "text"."""
        texts = [_read_input(value, f"input {i}") for i, value in enumerate(inputs)]
        length, frame = self._length(config), _frame(processor)
        encoded = processor.encode_arrays([self.prefix + text for text in texts])
        pairs = _Pairs.of((encoded, [np.zeros(0, np.int32)] * len(encoded)), (frame, frame))
        cut = pairs.lengths > length
        dataset = pairs.ragged(processor, length)
        return Features(dataset, {"tokenizer": processor, "cut": cut, "length": length})

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        return self._write(model, batch, self.n_best)

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """`{"translation", "score"}`, with several `{"translations": [{"translation", "score"}, ...]}`, best first;
        "cut" is the number of tokens that were read of a source that is longer."""
        predictions = []
        for row, texts, cut in zip(rows, _texts(rows, features.extra["tokenizer"]), features.extra["cut"], strict=True):
            found = [
                {"translation": text, "score": round(float(score), 6)}
                for text, score in zip(texts, row["scores"], strict=True)
            ]
            prediction: dict[str, Any] = found[0] if self.n_best == 1 else {"translations": found}
            predictions.append(prediction | ({"cut": features.extra["length"]} if cut else {}))
        return predictions

    def sample(self, model: Any, processor: Any, *, seed: int = 0) -> str | None:
        """The translation of `sample_text`."""
        if self.sample_text is None:
            return None
        prediction = self.predict_one(model, self.sample_text, processor)
        return prediction.get("translations", [prediction])[0]["translation"]


_Frame = tuple[np.ndarray, np.ndarray]
"""Ids before and after a text."""


class _Pairs:
    """Encoded pairs in one array: `places[0][i]` and `places[1][i]` are where source and target of pair i begin and
    end."""

    def __init__(self, ids: np.ndarray, places: np.ndarray, ends: tuple[int, int]):
        self.ids, self.places, self.ends = ids, places, ends

    @classmethod
    def of(cls, sides: Sequence[Sequence[np.ndarray]], frames: Sequence["_Frame"]) -> "_Pairs":
        """Of sources and targets without special tokens, and what stands around each."""
        framed = [(before, text, after) for texts, (before, after) in zip(sides, frames, strict=True) for text in texts]
        ends = np.cumsum([sum(map(len, parts)) for parts in framed]).reshape(2, -1)
        starts = np.concatenate([[0], ends.reshape(-1)[:-1]]).reshape(2, -1)
        ids = np.concatenate([part for parts in framed for part in parts]).astype(np.int32)
        source_end, target_end = (len(after) for _, after in frames)
        return cls(ids, np.stack([starts, ends], axis=-1), (source_end, target_end))

    def __len__(self) -> int:
        return self.places.shape[1]

    @property
    def lengths(self) -> np.ndarray:
        """Of the longer text of each pair."""
        return np.max(np.diff(self.places, axis=-1)[..., 0], axis=0)

    def no_longer_than(self, length: int) -> "_Pairs":
        return _Pairs(self.ids, self.places[:, self.lengths <= length], self.ends)

    def ragged(self, tokenizer: Tokenizer, length: int) -> Ragged:
        """As a dataset, texts cut at `length`, but with what ends them."""
        padding = {"input_ids": tokenizer.pad_id or 0, "labels": IGNORED_LABEL}
        source = grain.MapDataset.source(_CutPairs(self, length))
        return Ragged(source, np.minimum(self.lengths, length).astype(np.int32), length, padding)


class _CutPairs:
    def __init__(self, pairs: _Pairs, length: int):
        self.pairs, self.length = pairs, length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]:
        source, target = map(self._text, self.pairs.places[:, int(index)].tolist(), self.pairs.ends)
        return {"input_ids": source, "labels": target}

    def _text(self, place: Sequence[int], end: int) -> np.ndarray:
        ids = self.pairs.ids[slice(*place)]
        if len(ids) <= self.length:
            return ids
        return np.concatenate([ids[: self.length - end], ids[len(ids) - end :]])


def _make_tokenizer(data: TranslationData, pairs: Sequence[SentencePair]) -> Tokenizer:
    if data.tokenizer not in ("bpe", "unigram"):
        return Tokenizer.load(data.tokenizer)
    texts = [text for pair in pairs for text in (pair.source, pair.target)]
    return Tokenizer.train_subword(texts, vocab_size=data.vocab_size, kind=data.tokenizer)


def _frame(tokenizer: Tokenizer) -> _Frame:
    """What stands before and after a text: what the tokenizer says (BART's <s> and </s>), the token that ends a text
    at least."""
    end = tokenizer.eos_id
    if end is None:
        raise ValueError("the tokenizer has no token that ends a text (eos_token), which translation needs")
    before, after = Template.of(tokenizer).specials
    return before, after if end in after else np.append(after, end)


def _texts(rows: Sequence[Row], tokenizer: Tokenizer) -> list[list[str]]:
    """What was written for each row, best first."""
    special = set(tokenizer.target.special_ids)
    return [
        [
            tokenizer.target.decode([token for token in tokens[:length].tolist() if token not in special]).strip()
            for tokens, length in zip(row["tokens"], row["lengths"], strict=True)
        ]
        for row in rows
    ]


def _fingerprint(parts: Sequence[Sequence[SentencePair]], prefix: str) -> str:
    digest = hashlib.sha256(prefix.encode())
    for pairs in parts:
        digest.update(b"\0\0")
        for pair in pairs:
            digest.update(f"{pair.source}\0{pair.target}\n".encode())
    return digest.hexdigest()


def _read_input(value: Any, where: str) -> str:
    match value:
        case (str() as text) | {"text": str() as text}:
            pass
        case _:
            raise ValueError(f'{where} is {value!r:.60}, not a text or {{"text": ...}}')
    if not text.strip():
        raise ValueError(f"{where} is empty")
    return text.strip()
