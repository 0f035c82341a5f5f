"""The ids on disk are those of the text, split where promised, and never half there."""

import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from transformers_jax.data import TextData, Tokenizer, prepare_corpus
from transformers_jax.data import corpus as corpus_module

TEXT = "".join(f"{i} green bottles hanging on the wall été.\n" for i in range(400))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def make(cache, source, **options):
    options = {"tokenizer": "byte"} | options
    tokenizer = options.pop("given", None)
    return prepare_corpus(TextData(source=str(source), cache_dir=str(cache), **options), tokenizer=tokenizer)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")
    return path


@pytest.mark.parametrize("kind", ["character", "byte", "bpe", "wordpiece"])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.37])
def test_the_last_part_of_the_characters_is_held_out(tmp_path, cache, monkeypatch, kind, fraction):
    monkeypatch.setattr(corpus_module, "CHUNK_CHARACTERS", 64)  # many chunks and batches even of a small text
    monkeypatch.setattr(corpus_module, "BATCH_CHARACTERS", 500)
    made = make(cache, write(tmp_path / "a.txt", TEXT), tokenizer=kind, validation_fraction=fraction, vocab_size=300)
    cut = int(len(TEXT) * (1 - fraction))
    assert made.train.tolist() == made.tokenizer.encode(TEXT[:cut])
    assert made.validation.tolist() == made.tokenizer.encode(TEXT[cut:])
    assert (made.train_bytes, made.validation_bytes) == (len(TEXT[:cut].encode()), len(TEXT[cut:].encode()))
    first = made.tokenizer.token_bytes(int(made.validation[0]))
    assert made.validation_first_bytes == len(first)
    assert TEXT[cut:].encode().startswith(first) or kind == "wordpiece"  # which drops accents
    assert isinstance(made.train, np.memmap) and made.train.dtype == np.uint16 and not made.train.flags.writeable


def test_documents_are_separated_by_the_end_of_text(tmp_path, cache):
    texts = ["first", "", "second one", "third"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    made = make(cache, tmp_path / "a.jsonl", validation_fraction=0.4)  # 12 of 20 characters train
    assert made.train.tolist() == [*b"first", 256, *b"second "]
    assert made.validation.tolist() == [*b"one", 256, *b"third"]
    assert (made.train_bytes, made.validation_bytes) == (12, 8)
    made = make(cache, tmp_path / "a.jsonl", validation_fraction=0.25)  # cut at the border: 15 and 5
    assert (made.train.tolist(), made.validation.tolist()) == ([*b"first", 256, *b"second one"], [*b"third"])
    made = make(cache, tmp_path / "a.jsonl", validation_fraction=0.25, tokenizer="character")  # has no such token
    assert made.tokenizer.decode(made.train) == "firstsecond one"
    made = make(cache, tmp_path / "a.jsonl", validation_fraction=0.25, tokenizer="wordpiece", vocab_size=40)
    encode, sep = made.tokenizer.encode, made.tokenizer.sep_id  # BERT has no end of text, but a separator
    assert made.train.tolist() == [*encode("first"), sep, *encode("second one")]


def test_a_validation_source_is_held_out_whole(tmp_path, cache):
    train, held_out = write(tmp_path / "a.txt", "abcabc"), write(tmp_path / "b.txt", "cdcd")
    made = make(cache, train, validation_source=str(held_out), tokenizer="character")
    assert made.tokenizer.vocab_size == 4  # of both, or the held-out text could not be encoded
    assert (made.train.tolist(), made.validation.tolist()) == ([0, 1, 2, 0, 1, 2], [2, 3, 2, 3])
    assert made.fingerprint != make(cache, train, tokenizer="character").fingerprint


def test_bpe_sees_the_training_part_only(tmp_path, cache):
    path = write(tmp_path / "a.txt", "train " * 90 + "zebra " * 10)
    tokenizer = make(cache, path, tokenizer="bpe").tokenizer
    assert len(tokenizer.encode(" train")) == 1
    assert len(tokenizer.encode(" zebra")) > 4


def test_wordpiece_sees_the_training_part_only_in_the_case_asked_for(tmp_path, cache):
    path = write(tmp_path / "a.txt", "Train " * 90 + "zebra " * 10)
    tokenizer = make(cache, path, tokenizer="wordpiece", vocab_size=60).tokenizer
    assert len(tokenizer.encode("Train")) == 1 and tokenizer.encode("TRAIN") == tokenizer.encode("train")
    assert tokenizer.encode("zebra") == [tokenizer.unk_id]
    cased = make(cache, path, tokenizer="wordpiece", vocab_size=60, lowercase=False).tokenizer
    assert len(cased.encode("Train")) == 1 and cased.encode("TRAIN") == [cased.unk_id]


def test_bpe_learns_from_chunks_of_the_whole_of_a_large_text(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(corpus_module, "CHUNK_CHARACTERS", 100)
    monkeypatch.setattr(corpus_module, "LEARNT_CHARACTERS", 2_000)
    path = write(tmp_path / "a.txt", "first " * 1000 + "middle " * 1000 + "final " * 1500)
    learnt = []
    train = Tokenizer.train_bpe
    monkeypatch.setattr(Tokenizer, "train_bpe", lambda texts, **o: train([learnt.append(t) or t for t in texts], **o))
    tokenizer = make(cache, path, tokenizer="bpe").tokenizer
    assert 1_500 < sum(map(len, learnt)) < 2_500
    assert all(len(tokenizer.encode(word)) == 1 for word in (" first", " middle", " final"))


def test_large_vocabularies_take_four_bytes(tmp_path, cache):
    text = "".join(map(chr, range(0x20000, 0x20000 + 70_000)))
    made = make(cache, write(tmp_path / "a.txt", text), tokenizer="character")
    assert made.train.dtype == made.validation.dtype == np.uint32
    assert made.validation.tolist() == list(range(63_000, 70_000))


def test_shakespeare_has_the_published_token_counts(shared_data, cache):
    source = shared_data / "tinyshakespeare/input.txt"
    made = make(cache, source, tokenizer="character")
    assert (len(made.train), len(made.validation)) == (1_003_854, 111_540)
    made = make(cache, source, tokenizer=str(shared_data / "tok_gpt2"))  # nanoGPT's data/shakespeare/readme.md
    assert (len(made.train), len(made.validation)) == (301_966, 36_059)


def test_memory_does_not_grow_with_the_text(tmp_path, cache):
    path = write(tmp_path / "a.txt", TEXT * 2000)  # 38 MB
    tracemalloc.start()
    made = make(cache, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.train_bytes + made.validation_bytes == path.stat().st_size > 3e7
    assert peak < 1e7


# The cache


def test_the_second_time_nothing_is_read(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "a.txt", TEXT)
    for kind in ("character", "byte", "bpe", "wordpiece"):
        first = make(cache, path, tokenizer=kind)
        with monkeypatch.context() as patch:
            patch.setattr(corpus_module._Preparation, "_scan", None)
            patch.setattr(Tokenizer, "encode_arrays", None)
            second = make(cache, path, tokenizer=kind)
            saved = make(cache, path, tokenizer=kind, given=first.tokenizer)  # a run that continues
        assert [made.from_cache for made in (first, second, saved)] == [False, True, True]
        for made in (second, saved):
            np.testing.assert_array_equal(made.train, first.train)
            assert made.tokenizer.fingerprint == first.tokenizer.fingerprint
            names = ("fingerprint", "train_bytes", "validation_bytes", "validation_first_bytes")
            assert all(getattr(made, name) == getattr(first, name) for name in names)


def test_a_change_of_text_or_options_is_noticed(tmp_path, cache):
    path = write(tmp_path / "a.txt", TEXT)
    seen = [make(cache, path)]
    seen.append(make(cache, path, validation_fraction=0.2))
    seen.append(make(cache, path, tokenizer="bpe", vocab_size=300))
    seen.append(make(cache, path, tokenizer="bpe", vocab_size=301))
    seen.append(make(cache, path, tokenizer="wordpiece", vocab_size=301))
    seen.append(make(cache, path, tokenizer="wordpiece", vocab_size=301, lowercase=False))
    status = path.stat()
    write(path, TEXT.replace("green", "brown"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    seen.append(make(cache, path))
    assert not any(made.from_cache for made in seen)
    assert len({made.fingerprint for made in seen}) == len(seen)
    assert seen[-1].tokenizer.decode(seen[-1].train[:20]) == "0 brown bottles hang"


def test_the_fingerprint_is_that_of_the_content_not_of_the_place(tmp_path, cache):
    here, there = write(tmp_path / "a.txt", TEXT), write(tmp_path / "sub/b.txt", TEXT)
    assert make(cache, here).fingerprint == make(tmp_path / "other", there).fingerprint
    one, two = write(tmp_path / "1.txt", TEXT[:500]), write(tmp_path / "2.txt", TEXT[500:])
    assert make(cache, f"{one},{two}").fingerprint != make(cache, here).fingerprint


@pytest.mark.parametrize("damage", ["truncate", "garbage", "missing", "emptied"])
def test_a_damaged_cache_is_made_anew_with_a_warning(tmp_path, cache, damage):
    path = write(tmp_path / "a.txt", TEXT)
    expected = make(cache, path).train.tolist()
    (folder,) = (cache / "corpora").iterdir()
    if damage == "truncate":
        os.truncate(folder / "train.bin", 1000)
    elif damage == "garbage":
        (folder / "corpus.json").write_text('{"dtype": "uint16", "tr')
    elif damage == "missing":
        (folder / "validation.bin").unlink()
    else:
        for file in folder.iterdir():
            file.unlink()
    with pytest.warns(UserWarning, match="is damaged and made anew"):
        made = make(cache, path)
    assert made.train.tolist() == expected and not made.from_cache
    assert make(cache, path).from_cache


def test_a_damaged_tokenizer_in_the_cache_is_trained_anew(tmp_path, cache):
    path = write(tmp_path / "a.txt", TEXT)
    expected = make(cache, path, tokenizer="bpe").fingerprint
    (folder,) = (cache / "tokenizers").iterdir()
    (folder / "tokenizer.json").write_text("{")
    assert make(cache, path, tokenizer="bpe").fingerprint == expected


def test_an_error_while_preparing_leaves_nothing(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "a.txt", TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(cache, path)
    assert list((cache / "corpora").iterdir()) == []
    assert not make(cache, path).from_cache


def test_text_that_changes_while_it_is_read_is_refused(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "a.txt", TEXT)
    encode = Tokenizer.encode_arrays

    def encode_and_change(self, texts):
        write(path, TEXT + "more")
        return encode(self, texts)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_arrays", encode_and_change)
        with pytest.raises(ValueError, match="changed while it was read; run again"):
            make(cache, path)
    assert list((cache / "corpora").iterdir()) == []


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path, cache):
    old, young = (write(cache / "corpora" / f".unfinished-{name}/train.bin", "x") for name in ("old", "young"))
    for path in (old, old.parent):
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    make(cache, write(tmp_path / "a.txt", TEXT))
    assert not old.parent.exists() and young.exists()


PREPARE = """
import sys
from transformers_jax.data import TextData, prepare_corpus
print("ready", flush=True)
sys.stdin.readline()
made = prepare_corpus(TextData(source=sys.argv[1], cache_dir=sys.argv[2], tokenizer="byte"))
print(made.fingerprint, len(made.train), made.from_cache, flush=True)
"""


def test_processes_at_once_and_killed_ones_leave_a_whole_cache(tmp_path, cache):
    path = write(tmp_path / "a.txt", TEXT * 500)  # 10 MB, a good tenth of a second
    command = [sys.executable, "-c", PREPARE, str(path), str(cache)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    processes[0].stdin.write("\n")
    processes[0].stdin.flush()
    deadline = time.monotonic() + 20
    while not list(cache.glob("corpora/.unfinished-*/train.bin")) and time.monotonic() < deadline:
        time.sleep(0.001)
    processes[0].send_signal(signal.SIGKILL)  # in the middle of writing
    assert processes[0].communicate()[0] == ""
    assert len(list(cache.glob("corpora/*"))) == len(list(cache.glob("corpora/.unfinished-*"))) == 1
    processes[1].stdin.write("\n")
    processes[1].stdin.flush()
    made = make(cache, path)  # at the same time as that process
    result = processes[1].communicate()[0].split()
    assert result[:2] == [made.fingerprint, str(len(made.train))]
    assert bytes(made.train.tolist()) == (TEXT * 500).encode()[: made.train_bytes]
    again = make(cache, path)
    assert again.from_cache and again.fingerprint == made.fingerprint


# Bad input


@pytest.mark.parametrize(
    "options, message",
    [
        ({"source": " "}, "source is empty"),
        ({"validation_source": ""}, "validation_source is empty"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0; it must be above 0 and below 1"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"tokenizer": ""}, "tokenizer is empty; use character, byte, bpe, wordpiece or the path of one"),
        ({"vocab_size": 256}, "vocab_size is 256; bpe needs at least 257"),
        ({"tokenizer": "wordpiece", "vocab_size": 15}, "vocab_size is 15; wordpiece needs at least 16"),
    ],
)
def test_impossible_configurations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TextData(**options)


def test_bad_text_is_refused_in_one_line(tmp_path, cache):
    for source, error, message in [
        (write(tmp_path / "empty.txt", ""), ValueError, "empty.txt holds no text"),
        (write(tmp_path / "short.txt", "a"), ValueError, "has 1 characters, too few to hold out 0.1 of them"),
        (tmp_path / "none.txt", FileNotFoundError, "no such text file"),
    ]:
        with pytest.raises(error, match=message) as raised:
            make(cache, source)
        assert "\n" not in str(raised.value)
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"bad\.txt: byte 3 \(0xff\) is not valid UTF-8"):
        make(cache, tmp_path / "bad.txt")
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        make(cache, write(tmp_path / "a.txt", TEXT), tokenizer=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"'z' \(U\+007A\) at position 1 is not one of the 1 characters"):
        make(cache, write(tmp_path / "z.txt", "az" * 20), given=Tokenizer.character("a"))
    with pytest.raises(ValueError, match=r"cannot write to the cache .*; set cache_dir"):
        make(write(tmp_path / "file", "x") / "cache", tmp_path / "a.txt")


def test_the_default_needs_no_download(cache):
    made = prepare_corpus(TextData(cache_dir=str(cache)))
    assert made.tokenizer.vocab_size == 1024 and len(made.train) > 100_000
    assert made.tokenizer.eos_id in made.train  # topics are documents
