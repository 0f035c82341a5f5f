"""Tokenizers of T5 and Marian: sentencepiece's pieces with the model's ids, and nothing special in texts."""

import json
import pickle
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from transformers_jax.data import Tokenizer

TEXTS = ["The value of the expression.", "  Über  allen\tGipfeln\n", "1 + 1 = 2; isn’t it.", "Ｆull ﬁx", "", " "]
SPELT = ["</s>", "<pad>", "<unk>", "a</s>b", "</s></s> <pad>", "x<extra_id_0>", "<extra_id_99> <unk>", "<s>warte</s>"]
T5_IDS = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
ODD = st.lists(
    st.sampled_from([*SPELT, "the", " ", "  ", "\n", "▁", "é", "\U0001f600", "你好", ">>fra<<", "<<", "<"])
    | st.text(st.characters(codec="utf-8"), max_size=8),
    max_size=12,
).map("".join)


def token(tokenizer, token_id):
    return tokenizer.backend.id_to_token(int(token_id))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, train_sentencepiece):
    folder = tmp_path_factory.mktemp("sentencepiece")
    train_sentencepiece(folder / "t5.model", **T5_IDS)
    train_sentencepiece(folder / "source.model")
    train_sentencepiece(folder / "target.model", vocab_size=700, byte_fallback=True)
    train_sentencepiece(folder / "bpe.model", model_type="bpe", **T5_IDS)
    return folder


@pytest.fixture(scope="module")
def t5(folder):
    return Tokenizer.load(folder / "t5.model")


@pytest.fixture(scope="module", params=["joint", "separate"])
def marian(request, folder, write_marian):
    directory = folder / request.param
    separate = request.param == "separate"
    return Tokenizer.load(write_marian(directory, folder / "source.model", folder / "target.model", separate=separate))


# T5


def test_t5_ids_are_those_of_its_model(folder, t5):
    model = SentencePieceProcessor(model_file=str(folder / "t5.model"))
    assert t5.encode_batch(TEXTS) == model.encode(TEXTS)
    assert [t5.decode(ids) for ids in t5.encode_batch(TEXTS)] == [model.decode(ids) for ids in model.encode(TEXTS)]
    assert [t5.pad_id, t5.eos_id, t5.unk_id, t5.bos_id] == [0, 1, 2, None]
    assert t5.vocab_size == model.vocab_size() + 100
    assert token(t5, t5.vocab_size - 1) == "<extra_id_0>" and token(t5, model.vocab_size()) == "<extra_id_99>"
    assert t5.special_ids == (0, 1, 2, *range(model.vocab_size(), t5.vocab_size))
    assert t5.backend.encode("the", add_special_tokens=True).ids == [*t5.encode("the"), 1]
    assert t5.target is t5


@settings(max_examples=200, deadline=None)
@given(text=ODD)
@example(text="".join(SPELT))
def test_no_text_becomes_a_special_token_of_t5(t5, text):
    assert set(t5.encode(text)) & set(t5.special_ids) <= {2}


def test_spelt_like_special_tokens_it_is_text(t5, marian):
    for text in SPELT:
        assert t5.decode(t5.encode(text)) == text
        for side in (marian, marian.target):
            assert not {side.pad_id, side.eos_id} & set(side.encode(text))


def test_the_configuration_counts_the_sentinels(folder, tmp_path):
    (tmp_path / "spiece.model").write_bytes((folder / "t5.model").read_bytes())
    assert Tokenizer.load(tmp_path).vocab_size == 600
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5TokenizerFast", "extra_ids": 3}')
    assert Tokenizer.load(tmp_path).vocab_size == 503


def test_pieces_of_its_own_kind(folder, train_sentencepiece, tmp_path):
    train_sentencepiece(tmp_path / "a.model", user_defined_symbols=["expression"], control_symbols=["<ctl>"], **T5_IDS)
    tokenizer = Tokenizer.load(tmp_path / "a.model")
    whole, control = (tokenizer.backend.token_to_id(piece) for piece in ("expression", "<ctl>"))
    assert tokenizer.encode("The expressions").count(whole) == 1
    assert control not in tokenizer.encode("a <ctl> b<ctl>") and control in tokenizer.special_ids
    assert whole not in tokenizer.special_ids


def test_what_is_no_model_of_t5_is_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"bpe\.model is not a unigram model"):
        Tokenizer.load(folder / "bpe.model")
    with pytest.raises(
        ValueError, match=r"source\.model is not a model of T5: it begins with \['<unk>', '<s>', '</s>'"
    ):
        Tokenizer.load(folder / "source.model")
    (tmp_path / "spiece.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"spiece\.model is not a sentencepiece model"):
        Tokenizer.load(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers-jax\[sentencepiece\]'"):
        Tokenizer.load(folder / "t5.model")


def test_a_saved_t5_needs_no_sentencepiece(t5, tmp_path, monkeypatch):
    t5.save(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.fingerprint, loaded.config, loaded.special_ids) == (t5.fingerprint, t5.config, t5.special_ids)
    assert loaded.encode_batch(TEXTS + SPELT) == t5.encode_batch(TEXTS + SPELT)


# Marian


def test_marian_ids_are_those_that_its_vocabulary_gives_the_pieces(folder, marian):
    for side, model, name in [(marian, "source", "vocab"), (marian.target, "target", "target_vocab")]:
        directory = folder / ("separate" if marian.config["separate_vocabs"] else "joint")
        file = directory / f"{name}.json"
        vocab = json.loads((file if file.exists() else directory / "vocab.json").read_text("utf-8"))
        processor = SentencePieceProcessor(model_file=str(folder / f"{model}.model"))
        expected = [[vocab.get(piece, 1) for piece in pieces] for pieces in processor.encode(TEXTS, out_type=str)]
        assert side.encode_batch(TEXTS) == expected and [side.encode(text) for text in TEXTS] == expected
        assert side.vocab_size == len(vocab)
        assert [side.eos_id, side.unk_id, side.pad_id, side.bos_id] == [0, 1, len(vocab) - 1, None]
        assert side.special_ids == (0, 1, len(vocab) - 1)
    assert marian.encode_batch([]) == []


def test_targets_are_cut_by_their_own_model(marian):
    assert marian.target is not marian and marian.target.target is marian.target
    text = "\U0001f600 value"
    assert 1 in marian.encode(text)
    assert marian.target.encode(text).count(1) < 4  # of four bytes, which its model has


def test_a_language_in_front_is_one_token(marian):
    assert marian.encode(">>fra<< the value")[0] == 2
    assert marian.encode(">>fra<< the value")[1:] == marian.encode("the value")
    assert marian.encode(">>nowhere<< the value")[0] == 1
    assert 2 not in marian.encode("the >>fra<< value") + marian.encode(" >>fra<<") + marian.encode(">>fra<")
    assert marian.decode([2]) == ">>fra<<"


def test_unknown_characters_are_not_special_however_they_are_spelt(folder, write_marian, tmp_path):
    model = folder / "source.model"
    write_marian(tmp_path, model, model, pad_token="你好")
    (tmp_path / "vocab.json").write_text(json.dumps({"</s>": 0, "<unk>": 1, "你好": 2}), "utf-8")
    assert SentencePieceProcessor(model_file=str(model)).encode("你好", out_type=str) == ["▁", "你好"]
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.pad_id == 2 and tokenizer.encode("你好") == [1, 1]


@settings(max_examples=200, deadline=None)
@given(text=ODD)
@example(text="".join(SPELT))
@example(text=">>fra<< the \U0001f600\u00e9▁▁x")
def test_pieces_streams_and_batches_agree(marian, text):
    for side in (marian, marian.target):
        ids = side.encode(text)
        assert not {side.eos_id, side.pad_id} & set(ids)
        (pieces,) = side.pieces([text])
        assert pieces.ids.tolist() == ids
        assert all(0 <= start <= end <= len(text) for start, end in pieces.offsets.tolist())
        ids = [*ids, side.eos_id, *ids]
        stream = side.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == side.decode(ids)


def test_pieces_are_found_in_their_text(folder, write_marian, tmp_path):
    model = folder / "source.model"
    tokenizer = Tokenizer.load(write_marian(tmp_path, model, model, without=10_000))
    text = ">>fra<< Über  é the\U0001f600 value"
    (pieces,) = tokenizer.pieces([text])
    found = [text[start:end] for start, end in pieces.offsets]
    assert found[0] == ">>fra<<" and "".join(found[1:]) == "Überéthe\U0001f600value"
    spelt = [token(tokenizer, i).removeprefix("▁") for i in pieces.ids]
    known = [(a, b) for a, b, i in zip(found, spelt, pieces.ids, strict=True) if i != tokenizer.unk_id]
    assert len(known) > 5 and all(a == b for a, b in known)


def test_saved_files_give_the_same_tokenizer(marian, tmp_path):
    marian.save(tmp_path)
    separate = marian.config["separate_vocabs"]
    names = {"source.spm", "target.spm", "vocab.json", "tokenizer_config.json"} | (
        {"target_vocab.json"} if separate else set()
    )
    assert {path.name for path in tmp_path.iterdir()} == names
    for path in (tmp_path, tmp_path / "source.spm"):
        loaded = Tokenizer.load(path)
        for side, before in [(loaded, marian), (loaded.target, marian.target)]:
            assert (side.fingerprint, side.config) == (before.fingerprint, before.config)
            assert side.encode_batch(TEXTS + SPELT) == before.encode_batch(TEXTS + SPELT)
    assert marian.fingerprint != marian.target.fingerprint
    copy = pickle.loads(pickle.dumps(marian))
    assert copy.encode_batch(TEXTS) == marian.encode_batch(TEXTS)
    assert copy.target.encode_batch(TEXTS) == marian.target.encode_batch(TEXTS)


def test_files_that_are_missing_or_wrong_are_named(folder, write_marian, tmp_path, monkeypatch):
    model = folder / "source.model"
    write_marian(tmp_path, model, model, separate=True)
    (tmp_path / "target_vocab.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer of Marian in .*: target_vocab\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "target_vocab.json").write_text('{"<unk>": "first"}')
    with pytest.raises(ValueError, match=r"target_vocab\.json is not a vocabulary: an object of tokens and their ids"):
        Tokenizer.load(tmp_path)
    (tmp_path / "target_vocab.json").write_text('{"</s>": 0}')
    with pytest.raises(ValueError, match=r"target_vocab\.json is not a vocabulary of Marian: <unk> is not in it"):
        Tokenizer.load(tmp_path)
    write_marian(tmp_path, model, model)
    for content in (b"", b"no model"):
        (tmp_path / "target.spm").write_bytes(content)
        with pytest.raises(ValueError, match=r"target\.spm is not a sentencepiece model"):
            Tokenizer.load(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers-jax\[sentencepiece\]'"):
        Tokenizer.load(tmp_path)
