"""Pretraining's losses and what fills a mask, beside transformers with the same weights."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from bert_reference import VOCAB, make, to_torch  # noqa: E402

from transformers_jax.data import IGNORED_LABEL, Tokenizer, training_batches  # noqa: E402
from transformers_jax.experiment import load_config  # noqa: E402
from transformers_jax.loading import load  # noqa: E402
from transformers_jax.models import BertConfig  # noqa: E402
from transformers_jax.nn import stacked_mask  # noqa: E402
from transformers_jax.pretrained import from_pretrained, save_pretrained  # noqa: E402
from transformers_jax.tasks import MaskedLM  # noqa: E402
from transformers_jax.training.optimizer import make_optimizer  # noqa: E402
from transformers_jax.training.state import TrainState  # noqa: E402
from transformers_jax.training.step import make_train_step  # noqa: E402

LENGTH, MASKED = 13, 4


def draw(*, equal: bool):
    """A batch of ours, and its labels as transformers wants them: everywhere, -100 where nothing is hidden."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, VOCAB, (5, LENGTH)).astype(np.int32)
    lengths = np.array([13, 13, 9, 7, 11])
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)
    everywhere = np.full((5, LENGTH), IGNORED_LABEL)
    positions, labels = np.zeros((5, MASKED), np.int32), np.full((5, MASKED), IGNORED_LABEL, np.int32)
    for row, length in enumerate(lengths):
        count = MASKED if equal else (4, 1, 3, 0, 2)[row]
        chosen = np.sort(rng.choice(np.arange(1, length - 1), count, replace=False))
        positions[row, :count], labels[row, :count] = chosen, ids[row, chosen]
        everywhere[row, chosen] = ids[row, chosen]
        ids[row, chosen[::2]] = 4
    batch = dict(input_ids=ids, attention_mask=mask, masked_positions=positions, labels=labels)
    return batch, everywhere


def to_mean(task, model, batch):
    def mean(model, batch):
        total, weight = task.loss(model, batch)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))(model, batch)


def test_the_loss_and_its_gradient_are_those_of_transformers(tmp_path):
    reference = make("BertForMaskedLM", std=0.3)
    reference.save_pretrained(tmp_path)
    batch, everywhere = draw(equal=False)
    inputs = to_torch({name: batch[name] for name in ("input_ids", "attention_mask")})
    expected = reference(**inputs, labels=torch.tensor(everywhere).long()).loss
    expected.backward()
    with jax.default_matmul_precision("highest"):
        loss, gradients = to_mean(MaskedLM(), from_pretrained(tmp_path), batch)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    theirs = reference.bert.embeddings.word_embeddings.weight.grad.numpy()
    np.testing.assert_allclose(
        gradients.backbone.embedding.embedding[...], theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max()
    )


def test_with_pairs_the_loss_is_the_sum_of_both(tmp_path):
    reference = make("BertForPreTraining", std=0.3)
    reference.save_pretrained(tmp_path)
    batch, everywhere = draw(equal=True)
    types = (np.arange(LENGTH) >= 5).astype(np.int32) * batch["attention_mask"]
    follows = np.array([0, 1, 1, 0, 1], np.int32)
    inputs = to_torch(
        {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "token_type_ids": types}
    )
    with torch.no_grad():
        expected = reference(
            **inputs, labels=torch.tensor(everywhere).long(), next_sentence_label=torch.tensor(follows).long()
        ).loss
    batch |= {"token_type_ids": types, "next_sentence_label": follows}
    with jax.default_matmul_precision("highest"):
        loss, _ = to_mean(MaskedLM(next_sentence=True), from_pretrained(tmp_path), batch)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)


def test_training_follows_pytorch_update_for_update(tmp_path):
    """The recipe of configs/bert_mlm.py at a small size: same weights at first, same batches, no dropout."""
    recipe = dataclasses.replace(load_config("bert_mlm").optimizer, learning_rate=5e-3, weight_decay=0.1)
    updates, shares = 30, 0.9 ** np.arange(VOCAB - 5)
    tokens = np.random.default_rng(0).choice(np.arange(5, VOCAB), 2000, p=shares / shares.sum())
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, VOCAB))]
    (folder / "vocab.txt").write_text("\n".join(names))
    examples = MaskedLM().examples(tokens.astype(np.uint16), Tokenizer.load(folder), LENGTH + 4, seed=0)
    batches = itertools.islice(training_batches(examples, batch_size=16, seed=0), updates)
    batches = [{name: np.asarray(value) for name, value in batch.items()} for batch in batches]

    reference = make("BertForMaskedLM", std=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    reference.save_pretrained(tmp_path)
    parameters = list(reference.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.999), eps=1e-8)
    schedule = transformers.get_linear_schedule_with_warmup(adamw, updates // 10, updates)
    expected = []
    for batch in batches:
        arrays = to_torch(batch)
        hidden = reference.bert(arrays["input_ids"], attention_mask=arrays["attention_mask"]).last_hidden_state
        hidden = hidden.gather(1, arrays["masked_positions"][..., None].expand(-1, -1, hidden.shape[-1]))
        loss = torch.nn.functional.cross_entropy(reference.cls(hidden).flatten(0, 1), arrays["labels"].flatten())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()
        schedule.step()
        expected.append(loss.item())

    model = from_pretrained(tmp_path)
    optimizer = make_optimizer(recipe, updates, model, stacked=stacked_mask(model))
    step, state, losses = jax.jit(make_train_step(MaskedLM().loss, optimizer)), TrainState.create(model, optimizer), []
    with jax.default_matmul_precision("highest"):
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    assert expected[-1] < expected[0] - 0.2
    np.testing.assert_allclose(losses, expected, rtol=2e-4)


def test_masks_are_filled_in_as_by_the_pipeline_of_transformers(tmp_path):
    words = ["the cat sat on a mat", "the dog sat on the cat", "a mat is not unfillable"] * 3
    tokenizer = Tokenizer.train_wordpiece(words, vocab_size=90)
    config = BertConfig(vocab_size=tokenizer.vocab_size, max_length=24, dim=16, depth=2, heads=2, init_std=0.5)
    model = MaskedLM().build(config, rngs=nnx.Rngs(0))
    save_pretrained(model, tmp_path, processor=tokenizer)
    texts = ["The [MASK] sat on a mat.", "[MASK] dog is not [MASK]", "unfill[MASK]!"]
    fill = transformers.pipeline("fill-mask", model=str(tmp_path), device="cpu")
    ours = load(tmp_path).predict(texts)
    for text, expected, prediction in zip(texts, fill(texts, top_k=5), ours, strict=True):
        expected = expected if text.count("[MASK]") > 1 else [expected]
        assert len(prediction["tokens"]) == len(expected)
        for tokens, others in zip(prediction["tokens"], expected, strict=True):
            assert [one["token"] for one in tokens] == [other["token_str"] for other in others]
            np.testing.assert_allclose(
                [one["probability"] for one in tokens], [other["score"] for other in others], atol=2e-6
            )
