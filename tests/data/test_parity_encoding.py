"""transformers makes the same inputs of the same texts, words and questions, and reads what is saved."""

import json
import shutil
from pydoc_data.topics import topics

import numpy as np
import pytest

from transformers_jax.data import Tokenizer, encode_texts, encode_windows, encode_words, split_words

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DOCS = [topics[name] for name in sorted(topics)][:20]


def roberta(shared_data, folder, *, add_prefix_space):
    """GPT-2's vocabulary in RoBERTa's files."""
    folder.mkdir()
    shutil.copy(shared_data / "tok_gpt2/encoder.json", folder / "vocab.json")
    shutil.copy(shared_data / "tok_gpt2/vocab.bpe", folder / "merges.txt")
    config = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": add_prefix_space}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["minilm", "minilm vocab.txt", "sst2", "roberta", "roberta spaced", "gpt2"])
def pair(request, shared_data, tmp_path_factory):
    """Ours and theirs, of the same files."""
    folder = tmp_path_factory.mktemp("tokenizers")
    if request.param == "minilm vocab.txt":
        shutil.copy(shared_data / "minilm_l6/vocab.txt", folder)
        shutil.copy(shared_data / "minilm_l6/tokenizer_config.json", folder)
    elif request.param.startswith("roberta"):
        folder = roberta(shared_data, folder / "r", add_prefix_space="spaced" in request.param)
    else:
        names = {"minilm": "minilm_l6", "sst2": "hf_trained/bert_sst2", "gpt2": "hf_trained/gpt2_shakespeare"}
        folder = shared_data / names[request.param]
    # split_special_tokens: our texts never turn into special tokens
    reference = transformers.AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    return Tokenizer.load(folder), reference


@pytest.fixture(scope="module")
def texts(shared_data):
    lines = (shared_data / "sst2/dev.tsv").read_text("utf-8").splitlines()[:40]
    with (shared_data / "tok_goldens/tokenizer_goldens.jsonl").open(encoding="utf-8") as file:
        goldens = [json.loads(line)["text"] for line in file]
    return (
        [line.rsplit("\t", 1)[0] for line in lines] + goldens[:-40:4] + goldens[-40:] + ["", "a [SEP] b </s> c [MASK]"]
    )


def lists(inputs, *names):
    return [[array.tolist() for array in (one[name] for one in inputs)] for name in names]


def test_special_tokens_have_the_same_ids(pair):
    ours, theirs = pair
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_token_id"), name
    assert ours.vocab_size == len(theirs)


def test_single_texts(pair, texts):
    ours, theirs = pair
    for max_length in (7, 64, 512):
        expected = theirs(texts, truncation=True, max_length=max_length, return_token_type_ids=True)
        ids, types = lists(encode_texts(ours, texts, max_length=max_length), "input_ids", "token_type_ids")
        assert ids == expected["input_ids"] and types == expected["token_type_ids"]


def test_pairs_of_texts(pair, texts):
    ours, theirs = pair
    seconds = texts[::-1]
    for max_length in (7, 8, 33, 512):
        expected = theirs(texts, seconds, truncation=True, max_length=max_length, return_token_type_ids=True)
        ids, types = lists(encode_texts(ours, texts, seconds, max_length=max_length), "input_ids", "token_type_ids")
        assert ids == expected["input_ids"] and types == expected["token_type_ids"]


def test_words(pair, texts):
    ours, theirs = pair
    sentences = [[text[start:end] for start, end in split_words(text)] for text in texts if text.strip()]
    sentences.append(["a", "\u200b", "</s>", "[SEP]", "b"])
    for max_length in (9, 40):
        encoded = encode_words(ours, sentences, max_length=max_length)
        ids = lists([one.inputs for one in encoded], "input_ids")[0]
        if getattr(theirs, "add_prefix_space", True) is False:  # words are refused then; running text is the same
            assert ids == theirs([" ".join(s) for s in sentences], truncation=True, max_length=max_length)["input_ids"]
            continue
        expected = theirs(sentences, is_split_into_words=True, truncation=True, max_length=max_length)
        assert ids == expected["input_ids"]
        for i, one in enumerate(encoded):
            word_ids = expected.word_ids(i)
            assert one.first.tolist() == [word_ids.index(w) if w in word_ids else -1 for w in range(len(sentences[i]))]


def test_windows(pair, shared_data):
    ours, theirs = pair
    articles = json.loads((shared_data / "xquad/xquad.en.json").read_text("utf-8"))["data"]
    cases = [(q["question"], p["context"]) for a in articles for p in a["paragraphs"][:2] for q in p["qas"][:2]]
    questions, contexts = map(list, zip(*cases, strict=True))
    for max_length, overlap in ((128, 0), (128, 48), (384, 128)):
        windows = encode_windows(ours, questions, contexts, max_length=max_length, overlap=overlap)
        expected = theirs(
            questions,
            contexts,
            truncation="only_second",
            max_length=max_length,
            stride=overlap,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        ids, types = lists([window.inputs for window in windows], "input_ids", "token_type_ids")
        assert ids == expected["input_ids"] and types == expected["token_type_ids"]
        assert [window.example for window in windows] == expected["overflow_to_sample_mapping"]
        for i, window in enumerate(windows):
            places = [at for at, text in enumerate(expected.sequence_ids(i)) if text == 1]
            assert places == list(range(window.context_start, window.context_end))
            theirs_at = np.array(expected["offset_mapping"][i])[places]
            context = contexts[window.example]
            for (a, b), (c, d) in zip(window.offsets.tolist(), theirs_at.tolist(), strict=True):
                # ours are without the blank that GPT-2's tokens begin with, and with stripped accents
                assert context[a:b] == context[c:d].strip() or (a == c and context[d:b] == "\u0301")


def test_decoding(pair, texts):
    ours, theirs = pair
    for text in texts:
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_only_transformers_reads_separators_in_texts(shared_data):
    reference = transformers.AutoTokenizer.from_pretrained(shared_data / "minilm_l6")
    tokenizer = Tokenizer.load(shared_data / "minilm_l6")
    assert reference("a [SEP] b")["input_ids"].count(tokenizer.sep_id) == 2
    assert encode_texts(tokenizer, ["a [SEP] b"], max_length=20)[0]["input_ids"].tolist().count(tokenizer.sep_id) == 1


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.txt"])
def test_transformers_reads_a_trained_wordpiece(tmp_path, lowercase, files):
    tokenizer = Tokenizer.train_wordpiece(DOCS, vocab_size=500, lowercase=lowercase)
    tokenizer.save(tmp_path)
    (tmp_path / ("vocab.txt" if files == "tokenizer.json" else "tokenizer.json")).unlink()
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=True)
    assert len(reference) == tokenizer.vocab_size == 500
    assert reference.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    names = ("cls", "sep", "mask", "pad", "unk")
    assert [getattr(reference, f"{n}_token_id") for n in names] == [getattr(tokenizer, f"{n}_id") for n in names]
    texts = [*DOCS, "Été [SEP] 你好 \u200b_x \U0001f600", ""]
    expected = reference(texts, texts[::-1], truncation=True, max_length=99, return_token_type_ids=True)
    ids, types = lists(encode_texts(tokenizer, texts, texts[::-1], max_length=99), "input_ids", "token_type_ids")
    assert ids == expected["input_ids"] and types == expected["token_type_ids"]


def test_what_transformers_saves_is_read(pair, texts, tmp_path):
    ours, theirs = pair
    theirs.save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode_batch(texts) == ours.encode_batch(texts)
    both = [encode_texts(tokenizer, texts, texts, max_length=50) for tokenizer in (loaded, ours)]
    assert lists(both[0], "input_ids", "token_type_ids") == lists(both[1], "input_ids", "token_type_ids")
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        assert getattr(loaded, f"{name}_id") == getattr(ours, f"{name}_id"), name


def test_what_is_saved_is_read_by_transformers(pair, texts, tmp_path):
    ours, theirs = pair
    ours.save(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=True)
    assert again(texts, texts)["input_ids"] == theirs(texts, texts)["input_ids"]
