"""Sub-word vocabularies for translation: the same on every run, and decoding gives the normalised text back."""

import json
import os
import subprocess
import sys
import unicodedata
from pydoc_data.topics import topics

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformers_jax.data import Tokenizer, tokenizer_training

DOCS = [topics[name] for name in sorted(topics)][:20] + ["Über allen Gipfeln ist Ruh’, <b> & </b> 3,5 €"] * 3
KINDS = ["bpe", "unigram"]
BLANKS = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u200b"]
ODD = st.lists(
    st.sampled_from([*BLANKS, "a", "The", "über", "u\u0308ber", "ﬁ", "Ａ", "½", "▁", "▅", "<", ">", "\x07", "\x00"])
    | st.sampled_from(["<pad>", "</s>", "<unk>", "\U0001f600", "\U0001f468\u200d\U0001f469", "你好", "\ufffd"])
    | st.text(st.characters(codec="utf-8"), max_size=10),
    max_size=20,
).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def trained(request):
    return Tokenizer.train_subword(DOCS, vocab_size=700, kind=request.param)


def test_what_is_special_and_where(trained):
    assert [trained.pad_id, trained.eos_id, trained.unk_id, trained.bos_id, trained.cls_id] == [0, 1, 2, None, None]
    assert trained.special_ids == (0, 1, 2)
    assert trained.decode([0, 1, 2]) == "<pad></s><unk>"
    assert trained.vocab_size == 700
    assert trained.target is trained
    assert 2 not in trained.encode(DOCS[0])
    assert len(trained.encode(DOCS[0])) < 0.6 * len(DOCS[0])


@settings(max_examples=300, deadline=None)
@given(text=ODD)
@example(text="")
@example(text="  \u00dcber\u00a0\u00a0allen\n\n<pad></s> <unk>\t")
@example(text="▁▁ ▁a▁")
def test_decoding_gives_the_normalised_text_and_nothing_is_special(trained, text):
    ids = trained.encode(text)
    assert not {0, 1} & set(ids)
    assert max(ids, default=0) < trained.vocab_size
    normal = trained.backend.normalizer.normalize_str(text)
    known = {trained.backend.id_to_token(i) for i in range(trained.vocab_size)}
    expected, unknown_before = "", False
    for character in normal:  # a run of unknown characters within a word is one <unk>, wherever it is cut
        unknown = character != " " and character not in known
        expected += "" if unknown and unknown_before else "<unk>" if unknown else character
        unknown_before = unknown
    assert trained.decode(ids) == expected
    assert trained.encode(normal) == ids
    assert trained.encode_batch([text, "a"]) == [ids, trained.encode("a")]


def test_texts_are_normalised_as_by_sentencepiece(trained):
    same = [
        "Über allen",
        "  U\u0308ber \t\u3000 allen\r\n",
        "Ｕ\u0308ber\u00a0allen",
        "Über\u200ballen\x07",
        "▁Über▁▁allen",
    ]
    assert {trained.decode(ids) for ids in trained.encode_batch(same)} == {unicodedata.normalize("NFKC", same[0])}
    assert trained.encode(" \n\t") == trained.encode("") == []


def test_pieces_say_where_they_are(trained):
    (pieces,) = trained.pieces(["Über  allen Ruh"])
    words = {("Über  allen Ruh")[start:end] for start, end in pieces.offsets}
    assert all(len(word.split()) <= 1 for word in words) and pieces.offsets.max() == 15


def test_a_stream_is_what_decode_gives(trained):
    ids = [*trained.encode("Über allen \U0001f600 Gipfeln"), 1, *trained.encode("ist Ruh")]
    stream = trained.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == trained.decode(ids)


def test_files_name_the_special_tokens(trained, tmp_path):
    trained.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.fingerprint, loaded.config) == (trained.fingerprint, trained.config)
    assert loaded.encode_batch(DOCS) == trained.encode_batch(DOCS)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    assert config.items() >= {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}.items()
    named_by_its_vocabulary = Tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").unlink()
    assert (named_by_its_vocabulary.pad_id, Tokenizer.load(tmp_path).eos_id) == (0, 1)


def test_texts_full_of_special_tokens_teach_none(trained):
    kind = trained.backend.model.__class__.__name__.lower()
    tokenizer = Tokenizer.train_subword(["</s> <pad> x<unk>"] * 50, vocab_size=100, kind=kind)
    for text in ("</s>", "a</s>", "<pad><unk>", "x</s></s>"):
        ids = tokenizer.encode(text)
        assert not {0, 1, 2} & set(tokenizer.encode(text.replace("a", "x")))
        assert tokenizer.decode(ids) == text.replace("a", "a" if 2 not in ids else "<unk>")


SCRIPT = """
import sys
from transformers_jax.data import Tokenizer
# Pieces of equal frequency, between which the trainers decide by order.
texts = [f"{a}{b}{c} {c}{a}" for a in "abcdefgh" for b in "klmnop" for c in "rstuv"]
texts += [chr(0x4e00 + i) for i in range(200)]  # more characters than there is room for, all equally frequent
print(*(Tokenizer.train_subword(iter(texts), vocab_size=300, kind=kind).fingerprint for kind in sys.argv[1:]))
"""


def test_the_same_texts_give_the_same_ids_whatever_the_order_of_hashes_and_the_number_of_threads():
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *KINDS],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(threads)},
        )
        for seed, threads in [(0, 1), (1, 3), (2, 8)]
    ]
    printed = [run.communicate(timeout=200)[0].split() for run in runs]
    assert len(set(printed[0])) == len(KINDS) and printed[1:] == printed[:1] * 2


def test_what_cannot_be_trained_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"vocab_size is 15, but three special tokens .* at least 16"):
        Tokenizer.train_subword(["text"], vocab_size=15)
    with pytest.raises(ValueError, match="kind is 'wordpiece'; use bpe or unigram"):
        tokenizer_training.train_subword(["text"], vocab_size=100, kind="wordpiece")
    with pytest.raises(ValueError, match="at least one character"):
        Tokenizer.train_subword(["", " \n"], vocab_size=100)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers-jax\[sentencepiece\]'"):
        Tokenizer.train_subword(["text"], vocab_size=100, kind="unigram")
