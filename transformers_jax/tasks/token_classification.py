"""Token classification: the entities in a text, as a tag for each word."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformers_jax.data import (
    IGNORED_LABEL,
    EntityData,
    TaggedSentence,
    encode_words,
    pack_ragged,
    read_entities,
    split_words,
)
from transformers_jax.data.conll import Scheme, from_iob2, to_iob2
from transformers_jax.data.labelled import warn_once
from transformers_jax.models import TokenClassifier
from transformers_jax.tasks.base import (
    Examples,
    Features,
    Row,
    Task,
    abstract_arrays,
    abstract_texts,
    fingerprint,
    make_tokenizer,
    model_inputs,
    ragged,
    text_length,
    tokenizer_fact,
    usable,
    with_tokenizer,
)
from transformers_jax.tasks.labels import LabelNames, class_weights
from transformers_jax.tasks.language_modeling import cross_entropy
from transformers_jax.tasks.metrics import ENTITY_RULES, entity_metrics, need


@dataclass(frozen=True)
class TokenClassification(Task):
    """Train a model to tag the words of a text with entities. The first piece of a word carries its tag."""

    length: int | None = None
    """Longest sentence in tokens, special ones included. Words beyond it are not trained on, and count as missed in
    evaluation. None: the longest the model takes."""
    pack: bool = False
    """Train on rows of `length` tokens that hold several sentences, which do not see one another."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all tags."""
    class_weights: str | None = None
    """Weights of the tags in the loss: balanced (each tag counts the same in all), or TAG=WEIGHT,TAG=WEIGHT (1 for
    those not named)."""
    new_head: bool = False
    """Start a new head for the entities of the data, even if the checkpoint has one."""
    scoring: Literal["default", "strict"] = "default"
    """Which rule the entity scores use. default: conlleval's, for which I-X without a beginning begins an entity;
    strict: only B-X does (seqeval's strict mode with IOB2), and the scores are called strict_f1 and so on."""

    head: ClassVar = TokenClassifier
    data: ClassVar = EntityData

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        if self.scoring not in ENTITY_RULES:
            raise ValueError(f"task.scoring={self.scoring!r} is not one of {', '.join(ENTITY_RULES)}")

    @property
    def metric(self) -> str:
        return "f1" if self.scoring == "default" else "strict_f1"

    def prepare(
        self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        if not isinstance(data, EntityData):
            raise ValueError(f"token classification reads EntityData, not {type(data).__name__}")
        need("seqeval.metrics")
        length = text_length(self.length, config)
        train, held_out = (read_entities(data, part=part) for part in ("train", "validation"))
        types = Counter(tag[2:] for sentence in train for tag in sentence.tags if tag.startswith("B-"))
        names = LabelNames(
            config.labels or ("O", *(prefix + kind for kind in sorted(types) for prefix in ("B-", "I-")))
        )
        if training:
            _check_types(names, types, data.source)

        def numbers_of(sentence: TaggedSentence) -> np.ndarray:
            return _numbers(sentence, names)

        digest = fingerprint([[(one.words, one.tags) for one in part] for part in (train, held_out)])
        train, numbers = usable(data, train, numbers_of, noun="sentences")
        held_out, held_out_numbers = usable(data, held_out, numbers_of, noun="sentences")
        tokenizer = processor or make_tokenizer(data, (" ".join(sentence.words) for sentence in train))
        encoded, held_out_encoded = (
            encode_words(tokenizer, [sentence.words for sentence in part], max_length=length)
            for part in (train if training else [], held_out)
        )
        examples = [
            [
                sentence.inputs | {"labels": _piece_labels(sentence, labels)}
                for sentence, labels in zip(sentences, part, strict=True)
            ]
            for sentences, part in ((encoded, numbers if training else []), (held_out_encoded, held_out_numbers))
        ]
        if training and self.class_weights is not None:
            labels = np.concatenate([example["labels"] for example in examples[0]])
            weights = class_weights(self.class_weights, names, labels[labels >= 0].tolist())
            examples[0] = [example | {"class_weights": weights} for example in examples[0]]
        sizes = [len(example["input_ids"]) for part in examples for example in part]
        cut, held_out_cut = (sum(_words_cut(one, length) for one in part) for part in (encoded, held_out_encoded))
        if held_out_cut:
            warn_once(
                f"{held_out_cut:,} of {sum(len(one.words) for one in held_out):,} held-out words are beyond the limit "
                f"of {length} tokens; they are scored as O, so that their entities count as missed"
            )
        facts = {
            "entities": ", ".join(f"{kind} {types[kind]:,}" for kind in sorted(types)) + " to train on",
            "sentences": f"{data.source}: {len(train):,} to train on, {len(held_out):,} held out, {np.mean(sizes):.0f} "
            f"tokens on average, {cut:,} + {held_out_cut:,} words beyond the limit of {length}",
            "scores": self.scoring_rule(),
            "tokenizer": tokenizer_fact(data, tokenizer, given=processor is not None),
        }
        tokens = round(float(np.mean(sizes)))
        train_on = ragged(examples[0], tokenizer, length, token_labels=True) if training else None
        if self.pack and train_on is not None:
            packed = pack_ragged(train_on)
            train_on, tokens, facts["rows"] = packed.dataset, packed.tokens_in_row, packed.fact
        return Examples(
            train=train_on,
            validation=ragged(examples[1], tokenizer, length, token_labels=True),
            processor=tokenizer,
            fingerprint=digest,
            items_per_example=tokens,
            labels=names.names,
            facts=facts,
            extra={
                "first": [one.first for one in held_out_encoded],
                "tags": [
                    [tag[0] + _tag(names.names[number])[1:] for tag, number in zip(one.tags, labels, strict=True)]
                    for one, labels in zip(held_out, held_out_numbers, strict=True)
                ],
            },
        )

    def configure(self, config: Any, examples: Examples) -> Any:
        return with_tokenizer(config, examples.processor, labels=examples.labels)

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        length = text_length(self.length, config)
        batch = abstract_texts(batch_size, length, packed=self.pack) | abstract_arrays(batch_size, labels=[length])
        if self.class_weights is not None:
            batch["class_weights"] = jax.ShapeDtypeStruct((batch_size, len(config.labels)), np.float32)
        return batch

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats over the labels that are not -100, as (sum, number of labels), or with class weights
        as (weighted sum, sum of the labels' weights): PyTorch's `CrossEntropyLoss` with weight and label_smoothing."""
        logits = model(**model_inputs(model.config, batch), key=key).logits
        labels = batch["labels"]
        counted = (labels >= 0)[..., None]
        weights = batch["class_weights"][:, None] if "class_weights" in batch else 1.0
        targets = jnp.where(counted, jax.nn.one_hot(labels, logits.shape[-1]), 0.0)
        smoothed = jnp.where(counted, optax.smooth_labels(targets, self.label_smoothing), 0.0)
        return -jnp.sum(smoothed * weights * jax.nn.log_softmax(logits)), jnp.sum(targets * weights)

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        logits = model(**model_inputs(model.config, batch)).logits
        loss, labels = cross_entropy(logits, batch["labels"])
        return {"loss": loss, "labels": labels}, {"predicted": jnp.argmax(logits, -1)}

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Loss (without smoothing and weights), the scores of `tasks.metrics.entity_metrics` over all words, those
        beyond the length limit included, and the number of words."""
        names = np.array([*map(_tag, config.labels), "O"])
        predicted = []
        for row, first in zip(rows, extra["first"], strict=True):
            tags = names[np.where(first >= 0, row["predicted"][first], -1)].tolist()
            as_iob2 = self.scoring == "strict" and _notation(config.labels) != "iob2"
            predicted.append(to_iob2(tags) if as_iob2 else tags)
        metrics = entity_metrics(extra["tags"], predicted, strict=self.scoring == "strict")
        loss = totals["loss"] / max(totals["labels"], 1.0)
        return {"loss": loss, **metrics, "words": float(sum(map(len, extra["tags"])))}

    def scoring_rule(self) -> str:
        return ENTITY_RULES[self.scoring]

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        _read_input(value, where)

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Texts, whose words `split_words` finds, or lists of words, or dictionaries with "text" or "words".

        What is longer than the model takes is read in parts one after the other, each of as many words as fit, so that
        every word is tagged. A word that does not fit as a whole is read with its part for context, and tagged as the
        first of the next.
        """
        length = text_length(self.length, config)
        texts = [_read_input(value, f"input {i}") for i, value in enumerate(inputs)]
        parts: list[tuple[int, int, np.ndarray]] = []
        examples = []
        unread = [(i, 0) for i in range(len(texts))]
        while unread:
            words = [texts[i].words[start : start + length] for i, start in unread]
            following = []
            for (i, start), encoded in zip(unread, encode_words(processor, words, max_length=length), strict=True):
                count, total = len(encoded.first), len(texts[i].words)
                last = int(np.max(np.flatnonzero(encoded.first >= 0), initial=-1))
                if len(encoded.inputs["input_ids"]) == length and start + last + 1 < total:
                    count = max(last, 1)
                if start + count < total:
                    following.append((i, start + count))
                parts.append((i, start, encoded.first[:count]))
                examples.append(encoded.inputs)
            unread = following
        return Features(ragged(examples, processor, length), {"texts": texts, "parts": parts})

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        probabilities = jax.nn.softmax(model(**model_inputs(model.config, batch)).logits)
        return {"predicted": jnp.argmax(probabilities, -1), "probability": jnp.max(probabilities, -1)}

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """`{"entities": [{"type", "text", "start", "end", "score", "first_word", "last_word"}], "words", "tags"}`.

        `start` and `end` are characters of the text (of the words joined by single spaces if they were given), the
        words are numbered from 0, and the score is the mean probability of the entity's tags. Entities are read from
        the tags by conlleval's rule. A word without a piece has the tag O.
        """
        texts = features.extra["texts"]
        tags = [["O"] * len(text.words) for text in texts]
        scores = [[1.0] * len(text.words) for text in texts]
        for row, (i, start, first) in zip(rows, features.extra["parts"], strict=True):
            for word, place in enumerate(first, start):
                if place >= 0:
                    tags[i][word] = config.labels[int(row["predicted"][place])]
                    scores[i][word] = float(row["probability"][place])
        found = []
        for text, its_tags, its_scores in zip(texts, tags, scores, strict=True):
            entities = []
            for kind, first, last in entity_spans(list(map(_tag, its_tags))):
                start, end = text.spans[first][0], text.spans[last][1]
                entity = {"type": kind, "text": text.text[start:end], "start": start, "end": end}
                entity["score"] = round(float(np.mean(its_scores[first : last + 1])), 6)
                entities.append(entity | {"first_word": first, "last_word": last})
            found.append({"entities": entities, "words": text.words, "tags": its_tags})
        return found


def entity_spans(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """The type, the first and the last word of each entity, from tags in any notation, by conlleval's rule."""
    spans: list[tuple[str, int, int]] = []
    for word, tag in enumerate(to_iob2(tags)):
        if tag.startswith("B-"):
            spans.append((tag[2:], word, word))
        elif tag.startswith("I-"):
            spans[-1] = (*spans[-1][:2], word)
    return spans


@dataclass(frozen=True)
class _Text:
    """A text and where its words are."""

    text: str
    spans: list[tuple[int, int]]
    words: list[str]


def _read_input(value: Any, where: str) -> _Text:
    match value:
        case str() as text:
            spans = split_words(text)
            words = [text[start:end] for start, end in spans]
        case {"text": str() as text}:
            return _read_input(text, where)
        case {"words": list() as words}:
            return _read_input(words, where)
        case list() | tuple() if all(isinstance(word, str) for word in value):
            words, text = list(value), " ".join(value)
            ends = np.cumsum([len(word) + 1 for word in words]) - 1
            spans = [(int(end) - len(word), int(end)) for end, word in zip(ends, words, strict=True)]
        case _:
            raise ValueError(
                f'{where} is {value!r:.60}, not a text, a list of words, {{"text": ...}} or {{"words": [...]}}'
            )
    if not text.strip():
        raise ValueError(f"{where} is empty")
    return _Text(text, spans, words)


def _words_cut(encoded: Any, length: int) -> int:
    """The number of words beyond the length limit."""
    if len(encoded.inputs["input_ids"]) < length:
        return 0
    return len(encoded.first) - 1 - int(np.max(np.flatnonzero(encoded.first >= 0), initial=-1))


def _piece_labels(encoded: Any, numbers: np.ndarray) -> np.ndarray:
    labels = np.full(len(encoded.inputs["input_ids"]), IGNORED_LABEL, np.int32)
    kept = encoded.first >= 0
    labels[encoded.first[kept]] = numbers[kept]
    return labels


# The tags of checkpoints may be in another notation, or in lower case, or types alone.


def _tag(name: str) -> str:
    """The name of a class as a tag."""
    if name in ("O", "o"):
        return "O"
    return name[0].upper() + name[1:] if name[:1].upper() in "BIES" and name[1:2] == "-" else f"I-{name}"


def _notation(labels: Sequence[str]) -> Scheme:
    """The notation that tags of a model are in: IOBES if there are S- or E-, IOB1 if some type has no B-, else IOB2."""
    tags = set(map(_tag, labels))
    if any(tag[0] in "SE" for tag in tags):
        return "iobes"
    return "iob1" if any(tag[0] == "I" and "B" + tag[1:] not in tags for tag in tags) else "iob2"


def _numbers(sentence: TaggedSentence, names: LabelNames) -> np.ndarray:
    """The classes of the words, in the notation of the classes."""
    notation = _notation(names.names)
    numbers = []
    for tag in from_iob2(sentence.tags, notation):
        number = None
        if notation == "iob1" and tag[0] == "B":  # neighbours that the checkpoint cannot tell apart
            with suppress(ValueError):
                number = names.number(tag, sentence.where)
            tag = "I" + tag[1:]
        numbers.append(names.number(tag, sentence.where) if number is None else number)
    return np.array(numbers, np.int32)


def _check_types(names: LabelNames, types: Mapping[str, int], source: str) -> None:
    """ValueError if a type of entity has no example, or if there is none."""
    if not types:
        raise ValueError(f"{source}: all words to train on have the tag 'O'; there is nothing to learn")
    known = {kind.casefold() for kind in types}
    tags = [tag[2:] for tag in map(_tag, names.names) if tag != "O"]
    if missing := [kind for kind in dict.fromkeys(tags) if kind.casefold() not in known]:
        raise ValueError(
            f"{source}: no entity to train on is a {', '.join(map(repr, missing))} of the checkpoint; "
            "set task.new_head to start a head for the entities of the data"
        )
