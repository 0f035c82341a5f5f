"""Packed texts train as the separate ones: the same losses and gradients, for each task that packs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_tasks import whole_words

from transformers_jax.data import ClassificationData, EntityData, SpanData, TextData
from transformers_jax.models import BertConfig, GPTConfig
from transformers_jax.tasks import LanguageModeling, MaskedLM, SpanExtraction, TextClassification, TokenClassification

DOCUMENTS = ["anna smith", "the new york in the new york", "paris", "in paris the anna in york", "smith in paris"]
WORDS = ("the", "in", "anna", "smith", "new", "york", "paris")
SIZES = dict(dim=16, depth=2, heads=2, init_std=0.3, dropout=0.0, attention_dropout=0.0)
DECODER = GPTConfig(vocab_size=None, max_length=16, embedding_dropout=0.0, **SIZES)
ENCODER = BertConfig(vocab_size=None, max_length=16, **SIZES)


def sums(task, config, rows):
    """Loss, weight and gradients of all rows together."""
    model = jax.jit(lambda: task.build(config, rngs=nnx.Rngs(0)))()
    batch = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
    (loss, weight), gradients = jax.jit(jax.value_and_grad(task.loss, has_aux=True))(model, batch)
    return loss, weight, jax.tree.leaves(gradients)


def text_of(tmp_path, **fields):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    source = str(tmp_path / "text.jsonl")
    return TextData(source=source, validation_source=source, cache_dir=str(tmp_path / "cache"), **fields)


def test_documents_of_a_decoder(tmp_path):
    task = LanguageModeling(length=16, sampling="documents")
    data = text_of(tmp_path, tokenizer=whole_words(tmp_path, *WORDS))
    examples = task.prepare(data, DECODER)
    config = task.configure(DECODER, examples)
    rows = [examples.train[i] for i in range(len(examples.train))]
    tokens = [len(text.split()) + 1 for text in DOCUMENTS]
    assert f"5 texts in 2 rows of 16, {1 - sum(tokens) / 32:.1%} padding" == examples.facts["rows"]
    end = examples.processor.sep_id
    separate = []
    for text in DOCUMENTS:
        ids = [end, *examples.processor.encode(text), end]
        padding = 17 - len(ids)
        separate.append({
            "input_ids": np.pad(ids[:-1], (0, padding)),
            "labels": np.pad(ids[1:], (0, padding), constant_values=-100),
        })  # fmt: skip
    packed, alone = sums(task, config, rows), sums(LanguageModeling(length=16), config, separate)
    assert packed[1] == alone[1] == sum(tokens)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), packed, alone)
    abstract = task.abstract_batch(config, 2)
    assert {name: x.shape for name, x in abstract.items()} == {name: (2, 16) for name in rows[0]}


def test_masked_documents(tmp_path):
    task = MaskedLM(length=16, pack=True)
    data = text_of(tmp_path, tokenizer=whole_words(tmp_path, *WORDS))
    examples = task.prepare(data, ENCODER)
    config = task.configure(ENCODER, examples)
    rows = [examples.train[i] for i in range(len(examples.train))]
    assert "5 texts in 2 rows of 16" in examples.facts["rows"]
    separate = []
    for row in rows:
        masked = [place for place, label in zip(row["masked_positions"], row["labels"], strict=True) if label != -100]
        for segment in range(row["segment_ids"].max() + 1):
            places = np.flatnonzero(row["segment_ids"] == segment)
            here = [place for place in masked if place in places]
            labels = [row["labels"][masked.index(place)] for place in here]
            if not here:
                continue
            separate.append({
                "input_ids": np.pad(row["input_ids"][places], (0, 16 - len(places))),
                "attention_mask": np.pad(np.ones(len(places), int), (0, 16 - len(places))),
                "masked_positions": np.pad(np.array(here) - places[0], (0, 3 - len(here))),
                "labels": np.pad(labels, (0, 3 - len(here)), constant_values=-100),
            })  # fmt: skip
    packed, alone = sums(task, config, rows), sums(MaskedLM(length=16), config, separate)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), packed, alone)
    assert packed[1] >= len(rows)
    assert task.abstract_batch(config, 2).keys() == rows[0].keys()
    with pytest.raises(ValueError, match=r"task\.pack and task\.next_sentence do not go together"):
        MaskedLM(pack=True, next_sentence=True)


def test_sentences_with_entities(tmp_path):
    tag = dict(anna="B-PER", smith="I-PER", new="B-LOC", york="I-LOC", paris="B-LOC")
    blocks = ["\n".join(f"{word} {tag.get(word, 'O')}" for word in text.split()) for text in DOCUMENTS]
    (tmp_path / "train.conll").write_text("\n\n".join(blocks) + "\n")
    source = str(tmp_path / "train.conll")
    data = EntityData(source=source, validation_source=source, tokenizer=whole_words(tmp_path, *WORDS))
    task = TokenClassification(length=16, pack=True, class_weights="balanced")
    compare(task, TokenClassification(length=16, class_weights="balanced"), data, ENCODER)


LABELS = {
    "single_label_classification": ["person", "place", "place", "person", "place"],
    "multi_label_classification": [["person"], ["place"], [], ["person", "place"], ["place"]],
    "regression": [0.5, -1.0, 2.0, 0.0, 1.5],
}
POOLED = {
    "pooler": ENCODER,
    "mean": BertConfig(vocab_size=None, max_length=16, pooler=False, pooling="mean", **SIZES),
    "dense": BertConfig(vocab_size=None, max_length=16, pooler=False, classifier_activation="relu", **SIZES),
    "last": DECODER,
}


@pytest.mark.parametrize(
    ("problem", "pooled"),
    [(problem, "pooler") for problem in LABELS]
    + [("single_label_classification", pooled) for pooled in POOLED if pooled != "pooler"],
)
def test_texts_with_classes(tmp_path, problem, pooled):
    rows = [json.dumps({"text": text, "label": label}) for text, label in zip(DOCUMENTS, LABELS[problem], strict=True)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    source = str(tmp_path / "train.jsonl")
    data = ClassificationData(source=source, validation_source=source, tokenizer=whole_words(tmp_path, *WORDS))
    weights = dict(class_weights="person=3") if problem == "single_label_classification" else {}
    options = dict(length=16, problem=problem, **weights)
    compare(TextClassification(pack=True, **options), TextClassification(**options), data, POOLED[pooled])


def test_windows_with_answers(tmp_path):
    questions = [("anna", "anna smith in paris", "smith"), ("york", "new york", "york"), ("in", "the paris", "paris")]
    paragraphs = [
        {
            "context": context,
            "qas": [
                {"id": str(i), "question": text, "answers": [{"text": answer, "answer_start": context.index(answer)}]}
            ],
        }
        for i, (text, context, answer) in enumerate(questions)
    ]
    (tmp_path / "train.json").write_text(json.dumps({"data": [{"title": "one", "paragraphs": paragraphs}]}))
    source = str(tmp_path / "train.json")
    data = SpanData(source=source, validation_source=source, tokenizer=whole_words(tmp_path, *WORDS))
    compare(SpanExtraction(length=16, pack=True), SpanExtraction(length=16), data, ENCODER)


def compare(task, plain, data, config):
    """The loss and the gradients of the texts packed by `task` are those of `plain`, one text a row."""
    examples = task.prepare(data, config)
    config = task.configure(config, examples)
    rows = [examples.train[i] for i in range(len(examples.train))]
    ragged = plain.prepare(data, config).train
    batch = ragged.collate([ragged.dataset[i] for i in range(len(ragged))], 16)
    separate = [{name: values[i] for name, values in batch.items()} for i in range(len(ragged))]
    packed, alone = sums(task, config, rows), sums(plain, config, separate)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), packed, alone)
    assert len(rows) < len(ragged) and f"{len(ragged)} texts in {len(rows)} rows" in examples.facts["rows"]
    assert examples.items_per_example == round(sum(ragged.lengths) / len(rows))
    abstract = task.abstract_batch(config, 1)
    assert {name: x.shape[1:] for name, x in abstract.items()} == {name: np.shape(x) for name, x in rows[0].items()}
