"""The losses of the tasks are those of PyTorch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tasks import CONFIG, Lookup

from transformers_jax.tasks import SpanExtraction, TextClassification, TokenClassification

torch = pytest.importorskip("torch")
functional = torch.nn.functional
torch.set_num_threads(1)

CLOSE = dict(rtol=1e-5, atol=1e-6)
LABELS = ("O", "B-A", "I-A", "B-B", "I-B")


@pytest.fixture(params=range(3))
def random(request):
    return np.random.default_rng(request.param)


def mean_loss(task, table, batch, *, pooled=False, **fields):
    """The mean loss and its gradient with respect to the table of logits."""
    config = dataclasses.replace(CONFIG, vocab_size=len(table), **fields)
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(model):
        total, weight = task.loss(model, batch)
        return total / weight

    value, gradient = jax.value_and_grad(loss)(Lookup(table, config, pooled=pooled))
    return value, gradient.table[...]


def assert_equal(found, expected, theirs):
    expected.backward()
    np.testing.assert_allclose(found[0], expected.detach(), **CLOSE)
    np.testing.assert_allclose(found[1], theirs.grad, **CLOSE)


def some_ids(random, size, shape):
    ids = random.integers(0, size, shape).astype(np.int32)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize("smoothing", [0.0, 0.17])
@pytest.mark.parametrize("weighted", [False, True])
def test_tokens(random, smoothing, weighted):
    table = random.normal(0, 2, (11, 5)).astype(np.float32)
    batch = some_ids(random, 11, (3, 7))
    labels = np.where(random.random((3, 7)) < 0.4, -100, random.integers(0, 5, (3, 7)))
    weights = random.uniform(0.2, 3, 5).astype(np.float32)
    more = {"class_weights": np.stack([weights] * 3)} if weighted else {}
    found = mean_loss(
        TokenClassification(label_smoothing=smoothing), table, batch | {"labels": labels} | more, labels=LABELS
    )
    theirs = torch.tensor(table, requires_grad=True)
    criterion = torch.nn.CrossEntropyLoss(
        weight=torch.tensor(weights) if weighted else None, label_smoothing=smoothing, ignore_index=-100
    )
    logits = theirs[torch.tensor(batch["input_ids"]).long()]
    assert_equal(found, criterion(logits.reshape(-1, 5), torch.tensor(labels).reshape(-1)), theirs)


@pytest.mark.parametrize(("smoothing", "weighted"), [(0.0, False), (0.17, False), (0.0, True)])
def test_classes(random, smoothing, weighted):
    table = random.normal(0, 2, (11, 4)).astype(np.float32)
    batch = some_ids(random, 11, (6, 3))
    labels = np.array([0, 1, 2, 3, 1, -100])
    weights = random.uniform(0.2, 3, 4).astype(np.float32)
    more = {"weight": weights[labels % 4]} if weighted else {}
    task = TextClassification(label_smoothing=smoothing)
    batch |= {"labels": labels} | more
    found = mean_loss(task, table, batch, pooled=True, labels=("a", "b", "c", "d"))
    theirs = torch.tensor(table, requires_grad=True)
    criterion = torch.nn.CrossEntropyLoss(weight=torch.tensor(weights) if weighted else None, label_smoothing=smoothing)
    assert_equal(found, criterion(theirs[torch.tensor(batch["input_ids"][:, 1]).long()], torch.tensor(labels)), theirs)


def test_several_classes_and_numbers(random):
    table = random.normal(0, 2, (11, 4)).astype(np.float32)
    batch = some_ids(random, 11, (6, 3))
    places = torch.tensor(batch["input_ids"][:, 1]).long()
    labels = random.integers(0, 2, (6, 4))
    task = TextClassification(problem="multi_label_classification")
    found = mean_loss(
        task, table, batch | {"labels": labels}, pooled=True, labels=tuple("abcd"), problem_type=task.problem
    )
    theirs = torch.tensor(table, requires_grad=True)
    expected = functional.binary_cross_entropy_with_logits(theirs[places], torch.tensor(labels).float())
    assert_equal(found, expected, theirs)

    task, numbers = TextClassification(problem="regression"), random.normal(0, 2, 6).astype(np.float32)
    found = mean_loss(
        task, table[:, :1], batch | {"labels": numbers}, pooled=True, labels=("score",), problem_type="regression"
    )
    theirs = torch.tensor(table[:, :1], requires_grad=True)
    assert_equal(found, functional.mse_loss(theirs[places, 0], torch.tensor(numbers)), theirs)


def test_spans(random):
    table = random.normal(0, 2, (11, 2)).astype(np.float32)
    batch = some_ids(random, 11, (5, 9))
    labels = random.integers(0, 9, (5, 2))
    found = mean_loss(SpanExtraction(), table, batch | {"labels": labels})
    theirs = torch.tensor(table, requires_grad=True)
    logits = theirs[torch.tensor(batch["input_ids"]).long()]
    starts, ends = (functional.cross_entropy(logits[..., i], torch.tensor(labels[:, i])) for i in (0, 1))
    assert_equal(found, (starts + ends) / 2, theirs)
