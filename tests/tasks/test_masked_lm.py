"""Masked language modelling from text to metrics: what the loss is, that it falls, and who may not change it."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from transformers_jax.data import IGNORED_LABEL, TextData, Tokenizer, training_batches
from transformers_jax.evaluation import make_evaluate
from transformers_jax.experiment import Experiment
from transformers_jax.loading import Loaded, evaluate, load
from transformers_jax.models import BertConfig, GPTConfig
from transformers_jax.running import run
from transformers_jax.tasks import MaskedLM
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.mesh import MeshConfig, make_mesh, one_device
from transformers_jax.training.optimizer import OptimizerConfig

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ROWS = [f"{NUMBERS[i]} and {NUMBERS[j]} makes {NUMBERS[i + j]} ." for i in range(7) for j in range(6)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """80 documents of 2 to 23 sums each; the last tenth is held out."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(ROWS, rng.integers(2, 24))) for _ in range(80)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return TextData(
        source=str(folder / "text.jsonl"), tokenizer="wordpiece", vocab_size=100, cache_dir=str(folder / "cache")
    )


CONFIG = BertConfig(vocab_size=None, max_length=32, dim=16, depth=1, heads=2)


def made(data, *, seed=0, config=CONFIG, **settings):
    """(task, examples, model)."""
    task = MaskedLM(**settings)
    examples = task.prepare(data, config, seed=seed)
    config = task.configure(config, examples)
    return task, examples, build(config)


@functools.cache
def build(config):
    return jax.jit(lambda: MaskedLM().build(config, rngs=nnx.Rngs(0)))()


def batch_of(examples, size=8):
    batch = next(training_batches(examples.train, batch_size=size, seed=0))
    return {name: jnp.asarray(value) for name, value in batch.items()}


def loss(task):
    return jax.jit(task.loss)


# The loss


def test_the_loss_is_the_cross_entropy_of_the_whole_logits_at_the_labels(data):
    task, examples, model = made(data)
    batch = batch_of(examples)
    # Read out everywhere.
    logits = jax.jit(lambda model: model(batch["input_ids"], batch["attention_mask"]).logits)(model)
    labels = np.full(batch["input_ids"].shape, IGNORED_LABEL)
    for row in range(len(labels)):
        chosen = np.asarray(batch["labels"][row] >= 0)
        labels[row, np.asarray(batch["masked_positions"][row])[chosen]] = np.asarray(batch["labels"][row])[chosen]
    scored = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[scored], labels[scored])
    total, weight = loss(task)(model, batch)
    assert weight == scored.sum() >= 28
    assert total == pytest.approx(float(losses.sum()), rel=1e-5)
    sums, rows = jax.jit(task.evaluate)(model, batch)
    assert sums["loss"] == total and sums["tokens"] == weight and rows == {}
    assert sums["right"] == (np.asarray(logits.argmax(-1))[scored] == labels[scored]).sum()


def test_the_loss_starts_at_the_logarithm_of_the_vocabulary(data):
    task, examples, model = made(data, config=dataclasses.replace(CONFIG, vocab_size=500))
    total, weight = loss(task)(model, batch_of(examples, 32), key=jax.random.key(0))
    assert total / weight == pytest.approx(math.log(500), abs=0.1)


def test_pairs_add_the_next_sentence_loss_by_the_number_of_hidden_tokens(data):
    task, examples, model = made(data, next_sentence=True)
    batch = batch_of(examples)
    assert model.config.next_sentence and len({int(n) for n in (batch["labels"] >= 0).sum(-1)}) > 1
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids", "masked_positions")}
    output = jax.jit(lambda model: model(**inputs))(model)
    counts = np.asarray((batch["labels"] >= 0).sum(-1))
    chosen = np.asarray(batch["labels"] >= 0)
    masked = -np.asarray(jax.nn.log_softmax(output.logits))[chosen, np.asarray(batch["labels"])[chosen]]
    of_pairs = -np.asarray(jax.nn.log_softmax(output.next_sentence_logits))[
        np.arange(8), np.asarray(batch["next_sentence_label"])
    ]
    total, weight = loss(task)(model, batch)
    assert weight == counts.sum()
    assert total / weight == pytest.approx(masked.mean() + np.average(of_pairs, weights=counts), rel=1e-5)
    halves = [loss(task)(model, jax.tree.map(lambda x, h=half: x[h::2], batch)) for half in (0, 1)]
    assert sum(t for t, _ in halves) / sum(w for _, w in halves) == pytest.approx(float(total / weight), rel=1e-6)
    sums, rows = jax.jit(task.evaluate)(model, batch)
    np.testing.assert_allclose(rows["next_sentence_loss"], of_pairs, rtol=1e-5)
    expected = np.asarray(output.next_sentence_logits.argmax(-1) == batch["next_sentence_label"])
    np.testing.assert_array_equal(rows["next_sentence_accuracy"], expected)
    per_example = [{name: np.asarray(value[i]) for name, value in rows.items()} for i in range(8)]
    metrics = task.finish({name: float(value) for name, value in sums.items()}, per_example, {}, model.config)
    assert metrics["loss"] == pytest.approx(masked.mean() + of_pairs.mean(), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["masked_loss"]))
    assert metrics["next_sentence_accuracy"] == expected.mean()


def test_a_batch_with_nothing_hidden_has_loss_0(data):
    task, examples, model = made(data)
    batch = batch_of(examples)
    batch["labels"] = jnp.full_like(batch["labels"], IGNORED_LABEL)
    (total, weight), gradients = jax.jit(jax.value_and_grad(task.loss, has_aux=True))(model, batch)
    assert (total, weight) == (0, 0)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradients))


def test_a_rate_of_0_is_refused_for_training_and_evaluates_to_0(data):
    with pytest.raises(ValueError, match=r"task\.mask_rate=0 hides nothing"):
        MaskedLM(mask_rate=0.0).prepare(data, CONFIG)
    _, _, model = made(data)
    task = MaskedLM(mask_rate=0.0)
    examples = task.prepare(data, CONFIG, training=False)
    metrics = make_evaluate(task, examples, one_device(), 8, config=model.config)(model)
    assert metrics == {"loss": 0.0, "perplexity": 1.0, "accuracy": 0.0, "tokens": 0.0}
    task, examples, model = made(data, mask_rate=0.0, next_sentence=True)  # the other objective alone
    total, weight = loss(task)(model, batch_of(examples))
    assert weight == 8 and total / weight == pytest.approx(math.log(2), abs=0.1)


def test_a_rate_of_1_hides_everything(data):
    task, examples, model = made(data, mask_rate=1.0)
    batch = batch_of(examples)
    assert batch["labels"].shape == (8, 30)
    special = np.isin(batch["input_ids"], [2, 3, 0]).sum(1) - 2  # borders of documents, padding
    np.testing.assert_array_equal((batch["labels"] >= 0).sum(1), 30 - special)
    total, weight = loss(task)(model, batch)
    assert np.isfinite(total) and weight == (30 - special).sum()


# Examples


def test_separators_of_documents_are_never_hidden(data):
    _, examples, _ = made(data, mask_rate=1.0)
    tokenizer = examples.processor
    rows = [examples.train[i] for i in range(len(examples.train))]
    inside = sum((row["input_ids"][1:-1] == tokenizer.sep_id).sum() for row in rows)
    assert inside >= 60  # the borders of the documents to train on
    labels = np.concatenate([row["labels"] for row in rows])
    assert not np.isin(labels, tokenizer.special_ids).any()


def test_held_out_masks_do_not_depend_on_the_seed_of_the_run(data):
    first, second = (made(data, seed=seed)[1] for seed in (0, 1))
    for i in range(len(first.validation)):
        for name, value in first.validation[i].items():
            np.testing.assert_array_equal(value, second.validation[i][name])
    assert any((first.train[i]["labels"] != second.train[i]["labels"]).any() for i in range(9))


@pytest.mark.parametrize("settings", [{}, {"next_sentence": True}, {"whole_word": True}])
def test_evaluation_is_the_same_on_any_number_of_devices_and_for_any_batch(data, settings):
    task, examples, model = made(data, **settings)
    results = [
        make_evaluate(task, examples, make_mesh(MeshConfig(devices=devices)), batch, config=model.config)(model)
        for devices, batch in ((1, 8), (8, 16), (1, 5))
    ]
    assert len(examples.validation) % 8 and results[0]["tokens"] > 60
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize("words", [1, 2, 20])
def test_text_shorter_than_a_block_is_one_padded_example(tmp_path, words):
    (tmp_path / "a.txt").write_text("alpha beta " * 10)
    (tmp_path / "b.txt").write_text("alpha " * words)
    source = TextData(
        source=str(tmp_path / "b.txt"),
        validation_source=str(tmp_path / "a.txt"),
        tokenizer="wordpiece",
        vocab_size=40,
        cache_dir=str(tmp_path / "cache"),
    )
    task, examples, model = made(source)
    assert len(examples.train) == 1
    total, weight = loss(task)(model, batch_of(examples, 2))
    assert np.isfinite(total) and weight >= 2


# A run


@pytest.mark.parametrize("next_sentence", [False, True])
def test_a_run_learns_is_loaded_and_fills_in(data, tmp_path, next_sentence):
    experiment = Experiment(
        task=MaskedLM(length=32, next_sentence=next_sentence, sample_text="one and [MASK] makes two ."),
        model=dataclasses.replace(CONFIG, dim=32, dropout=0.0, attention_dropout=0.0),
        data=data,
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=10),
        training=TrainingConfig(steps=60, batch_size=16, accumulation=2, log_every=10, eval_every=60),
        mesh=MeshConfig(devices=2),
    )
    result = run(experiment, tmp_path / "run")
    start = math.log(result.state.model.config.vocab_size)
    extra = math.log(2) if next_sentence else 0.0
    assert result.evaluation["eval/loss"] < start - 1.0 + extra
    text, *probable = result.sample.split("\n")
    assert text.startswith("one and ") and text.endswith(" makes two .") and len(probable) == 1
    loaded = load(tmp_path / "run")
    metrics = evaluate(loaded)
    assert metrics["loss"] == pytest.approx(result.evaluation["eval/loss"], rel=1e-5)
    names = {"loss", "perplexity", "accuracy", "tokens"}
    if next_sentence:
        names |= {"masked_loss", "next_sentence_loss", "next_sentence_accuracy"}
    assert set(metrics) == names
    (prediction,) = loaded.predict(["one and [MASK] makes two ."])
    assert prediction["text"] == text


@pytest.mark.parametrize("text", ["no mask here", "[MASK] " + "plus " * 40])
def test_a_sample_that_cannot_be_filled_in_is_refused_before_training(data, text):
    with pytest.raises(ValueError, match=r"task.sample_text: input 0 has (no \[MASK\]|41 tokens)"):
        made(data, sample_text=text)


# Predictions


@pytest.fixture(scope="module")
def loaded(data):
    task, examples, model = made(data)
    return Loaded(model, examples.processor, task)


def test_predictions_are_the_most_probable_tokens_of_each_mask(loaded):
    texts = ["one and [MASK] makes two .", {"text": "[MASK] and five makes [MASK]"}, "[MASK]"]
    tokenizer, config = loaded.processor, loaded.model.config
    predictions = loaded.predict(texts, batch_size=2)
    assert [len(prediction["tokens"]) for prediction in predictions] == [1, 2, 1]
    names = tokenizer.backend.id_to_token
    apply = jax.jit(lambda model, ids, mask: model(ids, mask))
    pieces = [["one", "and", "[MASK]", "makes", "two", "."], ["[MASK]", "and", "five", "makes", "[MASK]"], ["[MASK]"]]
    for words, prediction in zip(pieces, predictions, strict=True):
        ids = [tokenizer.backend.token_to_id(token) for token in ["[CLS]", *words, "[SEP]"]]
        assert None not in ids
        padded = jnp.zeros((1, 8), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
        logits = apply(loaded.model, padded, (jnp.arange(8) < len(ids)).astype(jnp.int32)[None]).logits[0]
        places = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
        for place, tokens in zip(places, prediction["tokens"], strict=True):
            probabilities = np.asarray(jax.nn.softmax(logits[place]))
            best = np.argsort(-probabilities)[:5]
            assert [one["token"] for one in tokens] == [names(int(i)) for i in best]
            np.testing.assert_allclose([one["probability"] for one in tokens], probabilities[best], atol=2e-6)
    assert json.loads(json.dumps(predictions)) == predictions
    assert config.max_length == 32


@pytest.mark.parametrize(
    "token, text",
    [
        ("five", "One  and five, [SEP] (two) five."),
        ("##t", "One  andt, [SEP] (two)t."),
        (".", "One  and ., [SEP] (two) .."),
    ],
)
def test_the_text_is_filled_in_where_the_masks_are(data, token, text):
    task, examples, model = made(data)
    tokenizer = examples.processor
    features = task.features(["One  and [MASK], [SEP] (two) [MASK]."], tokenizer, model.config)
    row = {"ids": np.full((2, 5), tokenizer.backend.token_to_id(token)), "probabilities": np.full((2, 5), 0.2)}
    (prediction,) = task.predictions([row], features, model.config)
    assert prediction["text"] == text
    assert prediction["tokens"] == [[{"token": token, "probability": 0.2}] * 5] * 2


def test_byte_level_tokens_bring_their_own_blank(tmp_path):
    Tokenizer.train_bpe(ROWS * 2, vocab_size=300).save(tmp_path)
    file = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(file | {"mask_token": "<mask>"}))
    tokenizer = Tokenizer.load(tmp_path)
    task, config = MaskedLM(), BertConfig(vocab_size=400, max_length=32)
    features = task.features(["<mask> and five makes <mask> ."], tokenizer, config)
    ids = tokenizer.encode(" and five makes")
    expected = [tokenizer.mask_id, *ids, tokenizer.mask_id, *tokenizer.encode(" .")]
    example = features.dataset.dataset[0]
    assert example["input_ids"].tolist() == expected
    assert example["masked_positions"].tolist() == [0, 1 + len(ids)]
    (two,) = tokenizer.encode(" two")
    row = {"ids": np.full((2, 5), two), "probabilities": np.full((2, 5), 0.2)}
    (prediction,) = task.predictions([row], features, config)
    assert prediction["text"] == "two and five makes two ."


@pytest.mark.parametrize(
    "value, message",
    [
        ("one and two", r"input 1 has no \[MASK\] to fill in: 'one and two'"),
        ("", r"input 1 has no \[MASK\] to fill in"),
        (3, r'input 1 is 3, not a text or \{"text": \.\.\.\}'),
        ({"words": "[MASK]"}, r"input 1 is \{'words': '\[MASK\]'\}, not a text"),
        ("[MASK] " + "one " * 30, r"input 1 has 31 tokens, but at most 30 fit; shorten it"),
    ],
)
def test_inputs_that_cannot_be_filled_in_are_refused_by_number(loaded, value, message):
    with pytest.raises(ValueError, match=message):
        loaded.predict(["[MASK] and one", value])


# Bad settings


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mask_rate": 1.5}, "task.mask_rate=1.5 must be between 0 and 1"),
        ({"mask_share": -0.1}, "task.mask_share=-0.1 must be between 0 and 1"),
        ({"mask_share": 0.8, "random_share": 0.3}, "are more than 1 together"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MaskedLM(**settings)


def test_what_does_not_fit_together_is_refused(data):
    with pytest.raises(ValueError, match=r"task\.length=33 must be between 1 and model\.max_length=32"):
        MaskedLM(length=33).prepare(data, CONFIG)
    with pytest.raises(ValueError, match="the tokenizer has no mask token"):
        MaskedLM().prepare(dataclasses.replace(data, tokenizer="byte"), CONFIG)
    examples = MaskedLM().prepare(data, CONFIG)
    with pytest.raises(ValueError, match="needs an encoder such as BERT, not a GPTConfig"):
        MaskedLM().configure(GPTConfig(vocab_size=None, max_length=32, dim=16, depth=1, heads=2), examples)
    with pytest.raises(ValueError, match=r"but model\.token_types is 1"):
        MaskedLM(next_sentence=True).configure(dataclasses.replace(CONFIG, token_types=1), examples)


def test_pairs_need_documents(data, tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(ROWS))
    single = dataclasses.replace(data, source=str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="needs two documents of two tokens at least, but the held-out text has 1"):
        MaskedLM(next_sentence=True).prepare(single, CONFIG)
