"""A model without a head gives one vector for each text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.data import Tokenizer
from transformers_jax.loading import Loaded
from transformers_jax.models import BertConfig
from transformers_jax.tasks import TextEmbedding, task_of

TEXTS = ["a bright day", "the long and winding road leads to a door", "rain"]


@pytest.fixture(scope="module")
def loaded():
    tokenizer = Tokenizer.train_wordpiece(TEXTS, vocab_size=200)
    config = BertConfig(vocab_size=tokenizer.vocab_size, max_length=32, dim=16, depth=2, heads=2)
    model = config.build(rngs=nnx.Rngs(0))
    return Loaded(model, tokenizer, task_of(model))


def vectors(loaded, texts, **options):
    return np.array([prediction["embedding"] for prediction in loaded.predict(texts, **options)])


def test_vectors_are_the_normalised_mean_over_the_tokens(loaded):
    expected = []
    for text in TEXTS:
        ids = [loaded.processor.cls_id, *loaded.processor.encode(text), loaded.processor.sep_id]
        mean = np.asarray(loaded.model(jnp.array([ids], jnp.int32)).hidden[0], np.float64).mean(0)
        expected.append(mean / np.linalg.norm(mean))
    np.testing.assert_allclose(vectors(loaded, TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(vectors(loaded, [{"text": text} for text in TEXTS]), expected, atol=1e-6)


def test_neither_neighbours_nor_batches_change_a_vector(loaded):
    together = vectors(loaded, TEXTS)
    for batch_size in (1, 2, 7):
        np.testing.assert_allclose(vectors(loaded, TEXTS[::-1], batch_size=batch_size)[::-1], together, atol=1e-6)


def test_calls_of_predict_share_what_they_compile(loaded):
    traces = []

    class Counted(TextEmbedding):
        def rows(self, model, batch):
            traces.append(batch["input_ids"].shape)
            return super().rows(model, batch)

    counted = Loaded(loaded.model, loaded.processor, Counted())
    for _ in range(3):
        counted.predict(TEXTS, batch_size=4)
    assert len(traces) == 1


def test_what_is_not_a_text_is_named(loaded):
    with pytest.raises(ValueError, match="input 1 is '  ', not a text"):
        loaded.predict(["a day", "  "])
    with pytest.raises(ValueError, match="input 0 is 7, not a text"):
        loaded.predict([7])
    with pytest.raises(ValueError, match="predict takes a list of inputs"):
        loaded.predict("a day")
    assert loaded.predict([]) == []
    with pytest.raises(ValueError, match="can only be asked for embeddings"):
        loaded.task.prepare(None, loaded.model.config)


def test_other_poolings(loaded):
    first = Loaded(loaded.model, loaded.processor, TextEmbedding(pooling="first", normalize=False))
    ids = [loaded.processor.cls_id, *loaded.processor.encode(TEXTS[0]), loaded.processor.sep_id]
    hidden = jax.jit(lambda model, ids: model(ids).hidden)(loaded.model, np.array([ids], np.int32))
    np.testing.assert_allclose(vectors(first, TEXTS[:1])[0], hidden[0, 0], atol=1e-6)
