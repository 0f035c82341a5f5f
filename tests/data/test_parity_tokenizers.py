"""transformers reads what is saved and gives the same ids, and the other way round."""

import json
from pydoc_data.topics import topics

import pytest

from transformers_jax.data import Tokenizer

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DOCS = [topics[name] for name in sorted(topics)][:20]
TEXTS = [*DOCS, "  Hello\r\n\tworld  'll you’re 3,000 été 你好 \U0001f600 \u3000x", ""]


def ids_of(reference, texts):
    # split_special_tokens: our texts never turn into special tokens
    return [reference.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]


@pytest.mark.parametrize("kind", ["byte", "bpe", "character"])
def test_transformers_reads_what_is_saved(tmp_path, kind):
    if kind == "bpe":
        tokenizer = Tokenizer.train_bpe(DOCS, vocab_size=700)
    else:
        tokenizer = Tokenizer.byte() if kind == "byte" else Tokenizer.character("".join(TEXTS))
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(reference) == tokenizer.vocab_size
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    assert [getattr(reference, name) for name in names] == [tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id]
    assert ids_of(reference, TEXTS) == tokenizer.encode_batch(TEXTS)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert reference.decode(ids, clean_up_tokenization_spaces=False) == tokenizer.decode(ids) == text
    if kind == "character":
        with pytest.raises(Exception, match="UNK"):  # nor does it drop a character silently
            reference.encode("\u0416")
    else:
        (tmp_path / "tokenizer.json").unlink()  # GPT-2's own two files are enough
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert ids_of(reference, TEXTS) == tokenizer.encode_batch(TEXTS) == Tokenizer.load(tmp_path).encode_batch(TEXTS)


def test_what_transformers_saves_is_read(tmp_path):
    Tokenizer.train_bpe(DOCS, vocab_size=500).save(tmp_path / "ours")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    reference.add_special_tokens({"pad_token": "<pad>"})
    reference.save_pretrained(tmp_path / "theirs")
    loaded = Tokenizer.load(tmp_path / "theirs")
    assert (loaded.vocab_size, loaded.pad_id, loaded.eos_id) == (501, reference.pad_token_id, reference.eos_token_id)
    assert loaded.encode_batch(TEXTS) == ids_of(reference, TEXTS)
    # A pad token that only the configuration names is added where transformers adds it.
    config = json.loads((tmp_path / "ours/tokenizer_config.json").read_text())
    (tmp_path / "ours/tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<pad>"}))
    reference, loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours"), Tokenizer.load(tmp_path / "ours")
    assert loaded.pad_id == reference.pad_token_id == 500


@pytest.mark.parametrize("folder", ["hf_trained/gpt2_shakespeare", "hf_trained/bert_sst2", "tok_gpt2"])
def test_published_tokenizers(shared_data, folder):
    path = shared_data / folder
    if folder == "tok_gpt2":
        reference = transformers.GPT2Tokenizer(
            vocab=json.loads((path / "encoder.json").read_text("utf-8")),
            merges=[tuple(line.split()) for line in (path / "vocab.bpe").read_text("utf-8").splitlines()[1:] if line],
        )
    else:
        reference = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.vocab_size == len(reference)
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    assert [getattr(reference, name) for name in names] == [tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id]
    assert tokenizer.encode_batch(TEXTS) == ids_of(reference, TEXTS)
    ids = tokenizer.encode(TEXTS[-2])
    assert tokenizer.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)
