"""Span extraction: the stretch of a text that answers a question about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from transformers_jax.data import (
    IGNORED_LABEL,
    Question,
    SpanData,
    Template,
    Tokenizer,
    Window,
    char_span,
    encode_windows,
    pack_ragged,
    read_questions,
    texts_in_row,
    token_span,
)
from transformers_jax.data.labelled import warn_once
from transformers_jax.models import SpanPredictor
from transformers_jax.nn.pooling import tokens_of_texts
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
from transformers_jax.tasks.language_modeling import cross_entropy
from transformers_jax.tasks.metrics import squad_metrics, squad_v2_metrics

DEFAULT_LENGTH = 384
ALTERNATIVES = 3
WINDOWS_AT_ONCE = 128  # 128 x 384 x 30 sums in float32 are 6 MB


@dataclass(frozen=True)
class SpanExtraction(Task):
    """Train a model to mark the answer to a question in its context (Devlin et al. 2019, sections 4.2 and 4.3).

    Long contexts are read in windows that overlap. A window that holds the whole answer is trained on its first and
    last token, every other one on position 0 (`[CLS]`) for both.
    """

    length: int | None = None
    """Longest window in tokens: question, a stretch of the context and special ones. None: 384, or what the model takes
    if that is less."""
    overlap: int | None = None
    """Tokens of the context that neighbouring windows share: transformers' stride, while the doc_stride of the original
    BERT is the step. None: a third of the length."""
    pack: bool = False
    """Train on rows of `length` tokens that hold several windows, which do not see one another."""
    best: int = 20
    """Candidates for an answer that are compared; their probabilities sum up to 1."""
    max_answer_tokens: int = 30
    """Longest answer in tokens."""
    no_answer: bool = False
    """Some questions have no answer in their context (SQuAD 2.0); the model may say so."""
    no_answer_threshold: float = 0.0
    """There is no answer if position 0 scores higher than the best span by more than this."""
    new_head: bool = False
    """Start a new head, even if the checkpoint has one."""

    head: ClassVar = SpanPredictor
    data: ClassVar = SpanData

    def __post_init__(self):
        for name in ("best", "max_answer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"task.{name}={getattr(self, name)} must be at least 1")

    @property
    def metric(self) -> str:
        return "f1"

    def prepare(
        self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        if not isinstance(data, SpanData):
            raise ValueError(f"span extraction reads SpanData, not {type(data).__name__}")
        length, overlap = self._sizes(config)
        train, held_out = (read_questions(data, part=part) for part in ("train", "validation"))
        digest = fingerprint(
            [[(one.id, one.question, one.context, one.answers) for one in part] for part in (train, held_out)]
        )
        tokenizer = processor or make_tokenizer(
            data, dict.fromkeys(text for one in train for text in (one.context, one.question))
        )

        def check(question: Question) -> None:
            if not question.answers and not self.no_answer:
                raise ValueError(
                    f"{question.where}: the question has no answer; set task.no_answer if the model is to learn that"
                )
            check_length(question)

        check_length = _length_check(tokenizer, length, overlap)
        if training:
            train, _ = usable(data, train, check, noun="questions")
        held_out, _ = usable(data, held_out, check, noun="questions")
        unanswerable = [question for question in train if not question.answers]
        windows, held_out_windows = (
            _encode(tokenizer, part, length, overlap) for part in (train if training else [], held_out)
        )
        examples, held_out_examples = (
            [window.inputs | {"labels": _target(window, part[window.example])} for window in of_part]
            for part, of_part in ((train, windows), (held_out, held_out_windows))
        )
        found = {window.example for window, one in zip(windows, examples, strict=True) if one["labels"].any()}
        facts = {}
        if training:
            lost = len(train) - len(unanswerable) - len(found)
            if not found:
                raise ValueError(
                    f"{data.source}: no answer to train on fits into a window of {length} tokens; raise task.length"
                )
            if lost:
                warn_once(
                    f"{lost:,} of {len(train):,} answers to train on are in no window as a whole (of {length} tokens, "
                    f"with an overlap of {overlap}); their windows are trained on as if they had none"
                )
            facts["answers"] = f"{len(found):,} to train on, {len(unanswerable):,} questions without one"
        sizes = [len(window.inputs["input_ids"]) for window in (*windows, *held_out_windows)]
        facts |= {
            "questions": f"{data.source}: {len(train):,} to train on"
            + (f" in {len(windows):,} windows" if training else "")
            + f", {len(held_out):,} held out in {len(held_out_windows):,}, of {length} tokens at most "
            f"({np.mean(sizes):.0f} on average) that overlap by {overlap}",
            "tokenizer": tokenizer_fact(data, tokenizer, given=processor is not None),
        }
        tokens = round(float(np.mean(sizes)))
        train_on = ragged(examples, tokenizer, length) if training else None
        if self.pack and train_on is not None:
            packed = pack_ragged(train_on, {"labels": IGNORED_LABEL})
            train_on, tokens, facts["rows"] = packed.dataset, packed.tokens_in_row, packed.fact
        return Examples(
            train=train_on,
            validation=ragged(held_out_examples, tokenizer, length),
            processor=tokenizer,
            fingerprint=digest,
            items_per_example=tokens,
            facts=facts,
            extra={"windows": held_out_windows, "questions": held_out},
        )

    def configure(self, config: Any, examples: Examples) -> Any:
        return with_tokenizer(config, examples.processor)

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        length, _ = self._sizes(config)
        batch, texts = abstract_texts(batch_size, length, packed=self.pack), [texts_in_row(length)]
        if self.pack:
            return batch | abstract_arrays(batch_size, texts=texts, labels=[*texts, 2])
        return batch | abstract_arrays(batch_size, labels=[2])

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Mean of the cross-entropies (in nats) of the first and of the last token over all places but padding, as
        (sum, number of windows): what transformers computes of a window without padding."""
        return _loss(model(**model_inputs(model.config, batch), key=key).logits, batch)

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        logits = model(**model_inputs(model.config, batch)).logits
        loss, windows = _loss(logits, batch)
        return {"loss": loss, "windows": windows}, {"logits": logits}

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Loss of the windows, `squad_metrics` (with `no_answer`, `squad_v2_metrics`), and the number of questions."""
        questions: Sequence[Question] = extra["questions"]
        answers = [[text for text, _ in question.answers] for question in questions]
        candidates = self.candidates([row["logits"] for row in rows], extra["windows"], len(questions))
        texts = [
            _text(question.context, found.spans[0]) if len(found.spans) else ""
            for question, found in zip(questions, candidates, strict=True)
        ]
        if self.no_answer:
            margins = [found.margin for found in candidates]
            metrics = squad_v2_metrics(answers, texts, margins, threshold=self.no_answer_threshold)
        else:
            metrics = squad_metrics(answers, texts)
        return {"loss": totals["loss"] / totals["windows"], **metrics, "questions": float(len(questions))}

    input_columns: ClassVar[tuple[str, ...]] = ("question", "context")

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        _read_input(value, where)

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Pairs of a question and its context, or dictionaries with "question" and "context"."""
        questions = [_read_input(value, f"input {i}") for i, value in enumerate(inputs)]
        length, overlap = self._sizes(config)
        windows = _encode(processor, questions, length, overlap)
        examples = [window.inputs for window in windows]
        return Features(ragged(examples, processor, length), {"windows": windows, "questions": questions})

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        return {"logits": model(**model_inputs(model.config, batch)).logits}

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """`{"answer", "start", "end", "score", "alternatives": [{"answer", "start", "end", "score"}]}`.

        The answer is `context[start:end]`; with `no_answer` it may be "" from None to None. The score is its
        probability among the `best` candidates (and no answer, if that is one), the softmax of the summed logits; the
        alternatives are the next three.
        """
        questions = features.extra["questions"]
        candidates = self.candidates([row["logits"] for row in rows], features.extra["windows"], len(questions))
        found = []
        for question, its in zip(questions, candidates, strict=True):
            spans = [(int(start), int(end)) for start, end in its.spans]
            answers: list[dict[str, Any]] = [
                {"answer": question.context[start:end], "start": start, "end": end} for start, end in spans
            ]
            scores = list(its.scores)
            if self.no_answer or not spans:
                first = not spans or its.margin > self.no_answer_threshold
                place = 0 if first else max(1, int(np.sum(its.scores >= its.null_score)))
                answers.insert(place, {"answer": "", "start": None, "end": None})
                scores.insert(place, its.null_score)
            exponents = np.exp(np.array(scores) - max(scores))
            for answer, score in zip(answers, exponents / exponents.sum(), strict=True):
                answer["score"] = round(float(score), 6)
            found.append(answers[0] | {"alternatives": answers[1 : 1 + ALTERNATIVES]})
        return found

    def candidates(self, logits: Sequence[np.ndarray], windows: Sequence[Window], questions: int) -> "list[Candidates]":
        """The best answers to each question over all its windows, from logits `(length, 2)` of each window.

        All pairs of tokens are compared that are in the context, in order, and at most `max_answer_tokens` apart. Of
        equal ones the earlier window and the earlier, shorter span is better. A span that is in several windows has the
        best of its scores; the score of no answer is the lowest that the windows give position 0, as in the original.
        """
        order = np.argsort([window.context_end - window.context_start for window in windows], kind="stable")
        best: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for begin in range(0, len(order), WINDOWS_AT_ONCE):
            chunk = order[begin : begin + WINDOWS_AT_ONCE].tolist()
            best |= zip(chunk, self._best_pairs([(logits[i], windows[i]) for i in chunk]), strict=True)
        numbers: list[list[int]] = [[] for _ in range(questions)]
        for i, window in enumerate(windows):
            numbers[window.example].append(i)
        results = []
        for its in numbers:
            scores = np.concatenate([best[i][0] for i in its])
            pairs = [(windows[i], *pair) for i in its for pair in best[i][1].tolist()]
            kept: dict[tuple[int, int], float] = {}
            for place in np.argsort(-scores, kind="stable"):
                kept.setdefault(char_span(*pairs[place]), float(scores[place]))
                if len(kept) == self.best:
                    break
            null_score = min(float(logits[i][0, 0]) + float(logits[i][0, 1]) for i in its)
            results.append(Candidates(list(kept), np.array(list(kept.values())), null_score))
        return results

    def _best_pairs(self, pairs: Sequence[tuple[np.ndarray, Window]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each window the scores, and the (first, last) positions, of its best spans, the best one first."""
        longest = max(1, *(window.context_end - window.context_start for _, window in pairs))
        reach = min(self.max_answer_tokens, longest)
        first = np.full((len(pairs), longest), -np.inf, np.float32)
        last = np.full((len(pairs), longest + reach - 1), -np.inf, np.float32)
        for i, (logits, window) in enumerate(pairs):
            context, offsets = logits[window.context_start : window.context_end], window.offsets
            real = offsets[:, 0] < offsets[:, 1]  # not a blank, which would give an empty answer
            first[i, : len(context)] = np.where(real, context[:, 0], -np.inf)
            last[i, : len(context)] = np.where(real, context[:, 1], -np.inf)
        within_reach = np.lib.stride_tricks.sliding_window_view(last, reach, axis=1)
        # The best pairs begin at the starts whose best pair is among the best.
        best_of_start = first + within_reach.max(-1)
        starts = np.sort(np.argsort(-best_of_start, axis=1, kind="stable")[:, : self.best], axis=1)
        rows = np.arange(len(pairs))[:, None]
        sums = (first[rows, starts][..., None] + within_reach[rows, starts]).reshape(len(pairs), -1)
        ranks = np.argsort(-sums, axis=1, kind="stable")[:, : self.best]
        results = []
        for (_, window), of_window, its_starts, rank in zip(pairs, sums, starts, ranks, strict=True):
            rank = rank[np.isfinite(of_window[rank])]
            places = its_starts[rank // reach] + window.context_start
            results.append((of_window[rank].astype(np.float64), np.stack([places, places + rank % reach], axis=1)))
        return results

    def _sizes(self, config: Any) -> tuple[int, int]:
        """Length and overlap of the windows."""
        length = text_length(min(DEFAULT_LENGTH, config.max_length) if self.length is None else self.length, config)
        return length, length // 3 if self.overlap is None else self.overlap


@dataclass(frozen=True)
class Candidates:
    """Answers to a question: where they are in the context, from the best to the worst."""

    spans: list[tuple[int, int]]
    scores: np.ndarray
    """Sum of the logits of the first and the last token of each."""
    null_score: float
    """The same of position 0, which stands for no answer."""

    @property
    def margin(self) -> float:
        """By how much no answer scores higher than the best one."""
        return self.null_score - float(self.scores[0]) if len(self.scores) else np.inf


def _text(context: str, span: tuple[int, int]) -> str:
    return context[span[0] : span[1]]


def _loss(logits: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    labels = batch["labels"]
    if "texts" in batch:  # each window of a row by itself; its labels count from its own first token
        real = tokens_of_texts(batch["segment_ids"], batch["texts"])
        logits = logits[:, None]
        labels = jnp.where(labels >= 0, labels + jnp.argmax(real, -1)[..., None], labels)
    else:
        real = batch["attention_mask"] != 0
    logits = jnp.where(real[..., None], logits, jnp.finfo(logits.dtype).min)
    loss, labels = cross_entropy(jnp.swapaxes(logits, -1, -2), labels)
    return loss / 2, labels / 2


def _length_check(tokenizer: Tokenizer, length: int, overlap: int) -> Callable[[Question], None]:
    """What raises ValueError for a question that leaves no room for its context."""
    room = Template.of(tokenizer, texts=2).room(length) - overlap - 1

    def check(question: Question) -> None:
        size = len(tokenizer.encode(question.question))
        if overlap >= 0 and 0 < room < size:
            raise ValueError(
                f"{question.where}: the question has {size} tokens, but there is room for {room} in windows of "
                f"{length} that overlap by {overlap}; shorten it, raise task.length or lower task.overlap"
            )

    return check


def _encode(tokenizer: Tokenizer, questions: Sequence[Question], length: int, overlap: int) -> list[Window]:
    """The windows of questions; what does not fit is a ValueError that says where it is."""
    check_length = _length_check(tokenizer, length, overlap)
    for question in questions:
        check_length(question)
    try:
        return encode_windows(
            tokenizer,
            [question.question for question in questions],
            [question.context for question in questions],
            max_length=length,
            overlap=overlap,
        )
    except ValueError as error:
        raise ValueError(f"task.length={length}, task.overlap={overlap}: {error}") from None


def _target(window: Window, question: Question) -> np.ndarray:
    """Positions of the first and the last token of the first answer; 0 and 0 if it is not in the window."""
    span = None
    if question.answers:
        text, start = question.answers[0]
        span = token_span(window, start, start + len(text))
    return np.array(span or (0, 0), np.int32)


def _read_input(value: Any, where: str) -> Question:
    match value:
        case {"question": str() as question, "context": str() as context}:
            where = f"{where}, question {value['id']}" if "id" in value else where
        case (str() as question, str() as context):
            pass
        case _:
            raise ValueError(
                f'{where} is {value!r:.60}, not {{"question": ..., "context": ...}} or a question and its context'
            )
    for name, text in (("question", question), ("context", context)):
        if not text.strip():
            raise ValueError(f"{where}: the {name} is empty")
    return Question(where, question, context, [], where)
