"""WordPiece and RoBERTa's byte-level BPE: the reference's ids from every kind of file, and nothing special in texts."""

import json
import shutil
import unicodedata
from pydoc_data.topics import topics

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.data import Tokenizer
from transformers_jax.data.text_cuts import split_text

DOCS = [topics[name] for name in sorted(topics)][:40]
BERT_NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = [*BERT_NAMES, "the", "caf", "##e", "##é", "The", "Caf", "é", "e", "[", "]", "sep", "SEP", "你", "你好", "好"]


@pytest.fixture(scope="module")
def trained():
    return Tokenizer.train_wordpiece(DOCS, vocab_size=600)


def write(folder, *, vocab=VOCAB, **config):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def tokens(tokenizer, text):
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)]


# Training one


def test_training_learns_pieces_from_the_text(trained):
    assert [trained.backend.token_to_id(name) for name in BERT_NAMES] == [0, 1, 2, 3, 4]
    ids = [trained.pad_id, trained.unk_id, trained.cls_id, trained.sep_id, trained.mask_id, trained.eos_id]
    assert ids == [0, 1, 2, 3, 4, None]
    assert trained.vocab_size == 600
    letters = sum(c.isalnum() for c in DOCS[0])
    assert len(trained.encode(DOCS[0])) < 0.6 * letters
    assert trained.unk_id not in trained.encode(DOCS[0])
    assert trained.encode("Été") == trained.encode("ete")


def test_what_is_special_and_where_words_begin(trained):
    assert trained.special_ids == (0, 1, 2, 3, 4)
    vocab = trained.backend.get_vocab()
    assert trained.word_starts.tolist() == [not token.startswith("##") for token in sorted(vocab, key=vocab.get)]
    assert Tokenizer.byte().special_ids == (256,) and Tokenizer.byte().word_starts is None
    assert Tokenizer.character("ab").special_ids == ()


BLANKS = st.sampled_from([" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\x85", "\u0301", "", "'"])


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(BLANKS | st.sampled_from([*"aB9_é你!Σ", "[SEP]", "ing"]), max_size=30).map("".join),
    size=st.integers(1, 9),
)
def test_tokenising_in_chunks_equals_tokenising_the_whole(trained, text, size):
    assert trained.cuts == "words"
    chunks = list(split_text([text], size=size, cuts="words"))
    assert [i for chunk in chunks for i in trained.encode(chunk)] == trained.encode(text)


def test_the_same_texts_give_the_same_ids():
    # Words of equal frequency, whose order the trainer would otherwise draw at random each time.
    texts = [f"{a}{b}{c} {c}{a}" for a in "abcdefgh" for b in "klmnop" for c in "rstuv"]
    fingerprints = {Tokenizer.train_wordpiece(iter(texts), vocab_size=60).fingerprint for _ in range(8)}
    assert len(fingerprints) == 1
    assert fingerprints != {Tokenizer.train_wordpiece(texts, vocab_size=59).fingerprint}


def test_case_is_kept_when_asked():
    cased = Tokenizer.train_wordpiece(["The café the café"] * 3, vocab_size=100, lowercase=False)
    assert tokens(cased, "The café") == ["The", "café"]
    assert cased.encode("the") != cased.encode("The")


def test_the_vocabulary_has_at_most_the_size_asked_for():
    rare = "".join(map(chr, range(0x400, 0x4FF)))
    tokenizer = Tokenizer.train_wordpiece(["common words " * 50, rare], vocab_size=40)
    assert tokenizer.vocab_size <= 40
    assert tokenizer.unk_id not in tokenizer.encode("common words")
    with pytest.raises(ValueError, match=r"vocab_size is 15, but .* at least 16"):
        Tokenizer.train_wordpiece(DOCS, vocab_size=15)
    with pytest.raises(ValueError, match="at least one character"):
        Tokenizer.train_wordpiece([" \n", "\u200b"], vocab_size=100)


# Its promises


def test_decoding_joins_the_pieces_of_a_word(trained):
    text = "documentation of dictionaries, and more."
    assert any(token.startswith("##") for token in tokens(trained, text))
    assert trained.decode(trained.encode(text)) == text
    assert trained.decode([trained.cls_id, *trained.encode(text), trained.sep_id]) == f"[CLS] {text} [SEP]"
    stream = trained.stream()
    assert "".join(map(stream.push, trained.encode(text))) + stream.finish() == text


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from([*BERT_NAMES, " ", "a", "sep", "##a", "é", "你"]), max_size=12).map("".join))
def test_special_tokens_in_a_text_are_text(trained, text):
    special = {trained.pad_id, trained.cls_id, trained.sep_id, trained.mask_id}
    assert special.isdisjoint(trained.encode(text))
    assert special.isdisjoint(trained.pieces([text])[0].ids.tolist())


def test_the_framing_of_the_tokenizer_is_kept(trained, tmp_path):
    trained.save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoding = backend.encode("a", "b")
    assert encoding.tokens == ["[CLS]", "a", "[SEP]", "b", "[SEP]"] and encoding.type_ids == [0, 0, 0, 1, 1]


def test_saving_and_loading_changes_nothing(trained, tmp_path):
    trained.save(tmp_path)
    vocab = (tmp_path / "vocab.txt").read_text("utf-8").splitlines()
    assert vocab == [trained.backend.id_to_token(i) for i in range(600)]
    (tmp_path / "renamed-vocab.txt").write_bytes((tmp_path / "vocab.txt").read_bytes())
    for path in (tmp_path, *(tmp_path / name for name in ("tokenizer.json", "vocab.txt", "renamed-vocab.txt"))):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == trained.fingerprint and loaded.config == trained.config
        assert loaded.encode_batch(DOCS[:5]) == trained.encode_batch(DOCS[:5])


def test_fingerprints_of_tokenizers_without_a_separator_stay_what_they_were(shared_data):
    # Values from before WordPiece: runs and corpora are recognised by them.
    assert Tokenizer.byte().fingerprint == "b9e989ee0f184c81bffd4716293aa674c6075ac3d20b57fe81882b56dca18557"
    character, bpe = Tokenizer.character("hello été"), Tokenizer.train_bpe(["abc abd abc abd"] * 3, vocab_size=262)
    assert character.fingerprint == "a8c6794999c02a817345bfe714b8292e955b3327ec2f70d6859359a57da8edc0"
    assert bpe.fingerprint == "07bbc054ccc29d1fb75b0edfa02196f100a1d942ec4dfc92db58d02536f0f946"
    gpt2 = Tokenizer.load(shared_data / "tok_gpt2")
    assert gpt2.fingerprint == "74e7a8234838a44016c9581e5b0d33033c97d02bd718458e9f4b162343148b19"


# Files


def test_a_vocabulary_alone_is_lower_cased_bert(tmp_path):
    for path in (write(tmp_path / "v"), tmp_path / "v" / "vocab.txt"):
        tokenizer = Tokenizer.load(path)
        assert tokens(tokenizer, "The CAFÉ [SEP] 你好") == ["the", "caf", "##e", "[", "sep", "]", "你", "好"]
        assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.pad_id, tokenizer.unk_id) == (
            2,
            3,
            4,
            0,
            1,
        )
        assert tokenizer.config["tokenizer_class"] == "BertTokenizer"


def test_the_configuration_decides_on_spelling(tmp_path):
    def spelled(**config):
        return tokens(Tokenizer.load(write(tmp_path / "v", **config)), "The café 你好")

    cased = spelled(do_lower_case=False, model_max_length=512)
    assert cased == ["The", "caf", "##é", "你", "好"]
    assert spelled(do_lower_case=True, strip_accents=False) == ["the", "caf", "##é", "你", "好"]
    assert spelled(do_lower_case=False, strip_accents=True) == ["The", "caf", "##e", "你", "好"]
    assert spelled(tokenize_chinese_chars=False) == ["the", "caf", "##e", "你好"]


def test_the_configuration_wins_over_the_tokenizer_file(tmp_path):
    Tokenizer.load(write(tmp_path / "v")).save(tmp_path / "v")
    assert tokens(Tokenizer.load(tmp_path / "v"), "The café") == ["the", "caf", "##e"]
    write(tmp_path / "v", tokenizer_class="BertTokenizer", do_lower_case=False, strip_accents=None)
    assert tokens(Tokenizer.load(tmp_path / "v"), "The café") == ["The", "caf", "##é"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": True, "model_max_length": 512},
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512},
        {"tokenizer_class": "DistilBertTokenizerFast", "model_max_length": 512},
        {"unk_token": "[UNK]", "sep_token": {"content": "[SEP]"}, "cls_token": "[CLS]", "never_split": None}
        | {"pad_token": "[PAD]", "mask_token": "[MASK]", "name_or_path": "x", "do_basic_tokenize": True},
    ],
)
def test_special_tokens_need_not_be_named(tmp_path, config):
    tokenizer = Tokenizer.load(write(tmp_path / "v", **config))
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.pad_id, tokenizer.unk_id) == (
        2,
        3,
        4,
        0,
        1,
    )
    assert tokenizer.vocab_size == len(VOCAB)


def test_a_tokenizer_file_alone_is_enough(trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.cls_id, loaded.sep_id, loaded.fingerprint) == (2, 3, trained.fingerprint)


def test_what_is_no_vocabulary_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not a vocabulary\nat all\n")
    with pytest.raises(
        ValueError, match=r"notes\.txt is not the vocabulary of a WordPiece .* no line of it is \[UNK\]"
    ):
        Tokenizer.load(tmp_path / "notes.txt")
    (tmp_path / "notes.txt").write_bytes(b"\xff\xfe[UNK]")
    with pytest.raises(ValueError, match=r"notes\.txt is not the vocabulary of a WordPiece tokenizer \("):
        Tokenizer.load(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match=r"or encoder\.json \+ vocab\.bpe or vocab\.txt or spiece\.model is"):
        Tokenizer.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*vocab\.txt"):
        Tokenizer.load(tmp_path / "vocab.txt")


@pytest.mark.parametrize("prefix_space", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_roberta_files_frame_texts_as_roberta(tmp_path, named, prefix_space):
    bpe = Tokenizer.train_bpe(DOCS, vocab_size=400)
    bpe.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    config = {"tokenizer_class": "RobertaTokenizer"} if named else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_prefix_space": prefix_space}))
    vocab = json.loads((tmp_path / "vocab.json").read_text("utf-8"))
    if not named:  # they are recognised by their special tokens
        vocab |= {token: 400 + i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])}
        (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 405 and tokenizer.config["tokenizer_class"] == "RobertaTokenizer"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (tokenizer.cls_id, tokenizer.sep_id)
    a, b = ("Ġa", "Ġb") if prefix_space else ("a", "b")
    assert tokenizer.backend.encode("a", "b").tokens == ["<s>", a, "</s>", "</s>", b, "</s>"]
    assert tokenizer.encode("a </s>") == bpe.encode(" a </s>" if prefix_space else "a </s>")  # text stays text
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").fingerprint == tokenizer.fingerprint


def test_gpt2_ends_texts_though_its_configuration_does_not_say_so(tmp_path):
    Tokenizer.train_bpe(DOCS, vocab_size=400).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.cls_id) == (0, 0, None)


# Places in the text


def test_pieces_have_no_blanks_and_keep_their_accents(trained):
    bpe = Tokenizer.byte()
    (pieces,) = bpe.pieces(["é \n"])
    assert pieces.ids.tolist() == list("é \n".encode())
    assert pieces.offsets.tolist() == [[0, 1], [0, 1], [1, 1], [2, 2]]
    text = "the e\u0301te\u0301 \u0301 is"  # letters with accents of their own, one without a letter
    (pieces,) = Tokenizer.train_wordpiece(["the ete is"] * 9, vocab_size=100).pieces([text])
    assert [text[start:end] for start, end in pieces.offsets] == ["the", "e\u0301te\u0301", "is"]
    (pieces,) = Tokenizer.character("ab").pieces(["aba"])
    assert pieces.ids.tolist() == [0, 1, 0] and pieces.offsets.tolist() == [[0, 1], [1, 2], [2, 3]]
    (pieces,) = trained.pieces([""])
    assert pieces.ids.shape == (0,) and pieces.offsets.shape == (0, 2)


# The reference's ids


def test_ids_and_places_equal_the_original_bert(shared_data, tmp_path):
    shutil.copy(shared_data / "minilm_l6/vocab.txt", tmp_path)
    with (shared_data / "tok_goldens/tokenizer_goldens.jsonl").open(encoding="utf-8") as file:
        cases = [json.loads(line) for line in file]
    texts = [case["text"] for case in cases]
    assert len(cases) > 200
    for tokenizer in (Tokenizer.load(shared_data / "minilm_l6"), Tokenizer.load(tmp_path)):
        all_pieces = tokenizer.pieces(texts)
        assert [pieces.ids.tolist() for pieces in all_pieces] == [case["bert_google"] for case in cases]
        with_accents = 0
        for case, pieces in zip(cases, all_pieces, strict=True):
            if case["bert_hf_offsets"] is None:
                continue
            ours, theirs = pieces.offsets, np.array(case["bert_hf_offsets"], int).reshape(-1, 2)
            # The same, but for stripped accents that are characters of their own: those are part of the piece here.
            with_accents += not np.array_equal(ours, theirs)
            assert ours[:, 0].tolist() == theirs[:, 0].tolist()
            more = "".join(case["text"][end:to] for end, to in zip(theirs[:, 1], ours[:, 1], strict=True))
            assert (ours[:, 1] >= theirs[:, 1]).all() and {unicodedata.category(c) for c in more} <= {"Mn"}
        assert with_accents == 6
