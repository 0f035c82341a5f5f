"""Tokenizers of Marian and T5 against those of transformers: ids, decoded texts, special ids, files both ways."""

import json

import pytest

from transformers_jax.data import Tokenizer

transformers = pytest.importorskip("transformers")

TEXTS = [
    *[
        "",
        " ",
        "  two  blanks \n",
        "lines\nand\r\n\ttabs",
        "Über allen Gipfeln ist Ruh’.",
        "I was born in 92000, falsé.",
    ],
    *["\U0001f600 the 漢字 x", "▁a▁▁b", "Ｆull ﬁ½ e\u0301", "\u200b\u00a0\u3000z", "\x00\x07q", "a" * 300, "<<>>"],
    *[">>fra<< Hello", ">>nowhere<< Hello", ">>fra<<", " >>fra<< x", ">>unfinished", ">>a quote<< he said", ">><<x"],
]
# T5's vocabulary has these among its pieces, where transformers finds them; Marian's does not.
SPELT = ["</s>", "a</s>b", "<pad> <unk></s>", "<extra_id_0> a <extra_id_99>"]
SPECIAL = ("pad_token_id", "eos_token_id", "unk_token_id", "bos_token_id")
T5_IDS = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
T5_KINDS = {
    "plain": ({}, {}),
    "ten_sentinels": ({}, {"extra_ids": 10}),
    "bytes": ({"byte_fallback": True}, {"extra_ids": 0}),
    "pieces": ({"user_defined_symbols": ["Hello"], "control_symbols": ["<ctl>"]}, {}),
}


def check(reference, tokenizer, texts, *, targets=False, **decoding):
    key = "text_target" if targets else "text"
    for text in texts:
        # split_special_tokens: our texts never turn into special tokens
        ids = reference(**{key: text}, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text) == ids, text
        ids = [*ids, tokenizer.eos_id, *ids, tokenizer.pad_id]
        assert tokenizer.decode(ids) == reference.decode(ids, **decoding), text


def check_special(reference, tokenizer):
    ids = [tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.bos_id]
    assert [getattr(reference, name) for name in SPECIAL] == ids
    assert tokenizer.vocab_size == len(reference)


def check_marian(folder):
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert type(reference) is transformers.MarianTokenizer
    if not tokenizer.config["separate_vocabs"]:  # else it decodes the ids of targets only
        check(reference, tokenizer, TEXTS + SPELT, use_source_tokenizer=True)
    for text in TEXTS + SPELT:
        ids = reference(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text) == ids, text
    check(reference, tokenizer.target, TEXTS + SPELT, targets=True, use_source_tokenizer=False)
    check_special(reference, tokenizer)
    return reference, tokenizer


def check_t5(folder):
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert type(reference) is transformers.T5Tokenizer
    check(reference, tokenizer, TEXTS)
    check_special(reference, tokenizer)
    # A piece that is never cut is special there, though text becomes it; what files name as special are sentinels.
    own = {tokenizer.backend.token_to_id(piece) for piece in ("Hello", "<ctl>")}
    assert set(reference.all_special_ids) - own == set(tokenizer.special_ids) - own
    for text in SPELT:
        assert set(tokenizer.encode(text)) & set(tokenizer.special_ids) <= {tokenizer.unk_id}
    assert reference("the", "a")["input_ids"] == tokenizer.backend.encode("the", "a").ids
    return reference, tokenizer


def check_both_ways(check_family, folder, tmp_path):
    reference, tokenizer = check_family(folder)
    tokenizer.save(tmp_path / "ours")
    check_family(tmp_path / "ours")
    reference.save_pretrained(tmp_path / "theirs")
    check_family(tmp_path / "theirs")


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("source, target", [("unigram", "bytes"), ("bpe", "unigram")])
def test_marian(tmp_path, train_sentencepiece, write_marian, source, target, separate):
    train_sentencepiece(tmp_path / "unigram")
    train_sentencepiece(tmp_path / "bytes", vocab_size=700, byte_fallback=True)
    train_sentencepiece(tmp_path / "bpe", model_type="bpe", vocab_size=400)
    folder = write_marian(tmp_path / "marian", tmp_path / source, tmp_path / target, separate=separate)
    check_both_ways(check_marian, folder, tmp_path)


@pytest.mark.parametrize("kind", T5_KINDS)
def test_t5(tmp_path, train_sentencepiece, kind):
    options, config = T5_KINDS[kind]
    train_sentencepiece(tmp_path / "spiece.model", **T5_IDS, **options)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"} | config))
    check_both_ways(check_t5, tmp_path, tmp_path)


def test_of_a_tokenizer_json_of_t5_the_pieces_and_the_normaliser_are_taken(tmp_path, train_sentencepiece):
    train_sentencepiece(tmp_path / "spiece.model", **T5_IDS)
    Tokenizer.load(tmp_path).save(tmp_path / "other")
    layout = json.loads((tmp_path / "other/tokenizer.json").read_text("utf-8"))
    blanks = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    layout["normalizer"] = {"type": "Sequence", "normalizers": [layout["normalizer"], blanks]}
    layout["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    layout["post_processor"] = None
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(layout), "utf-8")
    check_t5(tmp_path / "other")


def test_published_models(shared_data, write_marian, tmp_path):
    models = shared_data / "hf_fixtures"
    texts = (models / "sample_text.txt").read_text("utf-8").splitlines()
    names = ["", "_bpe", "_with_bytefallback"]
    for i, source in enumerate(names):
        target = names[i - 1]
        paths = [models / f"test_sentencepiece{name}.model" for name in (source, target)]
        reference, tokenizer = check_marian(write_marian(tmp_path / f"marian{i}", *paths))
        check(reference, tokenizer, texts, use_source_tokenizer=True)
        check(reference, tokenizer.target, texts, targets=True, use_source_tokenizer=False)
    reference, tokenizer = check_marian(
        write_marian(tmp_path / "large", models / "spiece.model", models / "test_sentencepiece.model")
    )
    check(reference, tokenizer, texts, use_source_tokenizer=True)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_trained_sub_words(tmp_path, kind):
    tokenizer = Tokenizer.train_subword([*TEXTS, *SPELT] * 3, vocab_size=200, kind=kind)
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    check_special(reference, tokenizer)
    check(reference, tokenizer, TEXTS + SPELT, clean_up_tokenization_spaces=False)
    assert reference("the")["input_ids"] == [*tokenizer.encode("the"), tokenizer.eos_id]
