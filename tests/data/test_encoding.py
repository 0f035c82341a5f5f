"""Texts, words and windows as model inputs: nothing is lost, and every position leads back to the text."""

import itertools
import json
from pydoc_data.topics import topics

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformers_jax.data import (
    Template,
    Tokenizer,
    char_span,
    encode_texts,
    encode_windows,
    encode_words,
    split_words,
    token_span,
)

DOCS = [topics[name] for name in sorted(topics)][:20]
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def wordpiece(folder, *words, **config):
    (folder / "vocab.txt").write_text("\n".join([*NAMES, *words]) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    # d, q and w1 to w9 are one token each; "piecework" is three
    words = [*"abcdq", *(f"w{i}" for i in range(1, 10)), "piece", "##wo", "##rk"]
    return wordpiece(tmp_path_factory.mktemp("bert"), *words)


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer.train_bpe(DOCS, vocab_size=500)


@pytest.fixture(scope="module")
def roberta(bpe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("roberta")
    bpe.save(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "RobertaTokenizer"}))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def every(bert, bpe, roberta):
    return {"bert": bert, "gpt2": bpe, "roberta": roberta}


def shown(tokenizer, inputs):
    assert all(array.dtype == np.int32 and array.ndim == 1 for array in inputs.values())
    assert inputs["input_ids"].shape == inputs["token_type_ids"].shape
    return [tokenizer.backend.id_to_token(i) for i in inputs["input_ids"].tolist()]


# Texts


def test_texts_are_framed_as_the_tokenizer_does(every):
    for name, single, pair, types in [
        ("bert", "[CLS] a [SEP]", "[CLS] a [SEP] b c [SEP]", [0, 0, 0, 1, 1, 1]),
        ("roberta", "<s> a </s>", "<s> a </s> </s> b Ġc </s>", [0] * 7),
        ("gpt2", "a", "a b Ġc", [0] * 3),
    ]:
        (one,) = encode_texts(every[name], ["a"], max_length=20)
        (two,) = encode_texts(every[name], ["a"], ["b c"], max_length=20)
        assert " ".join(shown(every[name], one)) == single and not one["token_type_ids"].any()
        assert " ".join(shown(every[name], two)) == pair and two["token_type_ids"].tolist() == types
        assert Template.of(every[name]).size == len(one["input_ids"]) - 1
        assert Template.of(every[name], texts=2).size == len(two["input_ids"]) - 3


def test_a_separator_without_a_post_processor_frames_as_bert():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<c>": 0, "<s>": 1, "a": 2}, unk_token="a"))
    tokenizer = Tokenizer(backend, config={"cls_token": "<c>", "sep_token": "<s>"})
    (inputs,) = encode_texts(tokenizer, ["a"], ["a"], max_length=9)
    assert inputs["input_ids"].tolist() == [0, 2, 1, 2, 1] and inputs["token_type_ids"].tolist() == [0, 0, 0, 1, 1]
    plain = Tokenizer(backend, config={})
    assert encode_texts(plain, ["a"], max_length=9)[0]["input_ids"].tolist() == [2]


def test_a_template_is_found_whatever_the_post_processor_does(tmp_path):
    tokenizer = wordpiece(tmp_path, "a", "b")
    tokenizer.backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A:1 [SEP]:1 [CLS]:2",
        pair="$A:0 [SEP]:0 $B:1 [SEP]:1 [CLS]:2",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = Tokenizer(tokenizer.backend, config=tokenizer.config)
    (inputs,) = encode_texts(tokenizer, ["a a"], ["b"], max_length=9)
    assert shown(tokenizer, inputs) == ["a", "a", "[SEP]", "b", "[SEP]", "[CLS]"]
    assert inputs["token_type_ids"].tolist() == [0, 0, 0, 1, 1, 2]
    (window,) = encode_windows(tokenizer, ["a a"], ["b"], max_length=9, overlap=0)
    assert (window.context_start, window.context_end) == (3, 4)


@pytest.mark.parametrize(
    "a, b, max_length, kept",
    [
        (3, 9, 11, (3, 5)),
        (9, 3, 11, (5, 3)),
        (9, 9, 11, (4, 4)),
        (9, 9, 12, (4, 5)),
        (9, 8, 12, (5, 4)),
        (2, 2, 9, (2, 2)),
    ],
)
def test_the_longer_text_of_a_pair_is_cut(bert, a, b, max_length, kept):
    (inputs,) = encode_texts(bert, ["a " * a], ["b " * b], max_length=max_length)
    tokens = shown(bert, inputs)
    assert (tokens.count("a"), tokens.count("b")) == kept
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and tokens[kept[0] + 1] == "[SEP]"


def test_texts_are_cut_at_their_end(bert):
    (inputs,) = encode_texts(bert, ["w1 w2 w3 w4"], max_length=4)
    assert shown(bert, inputs) == ["[CLS]", "w1", "w2", "[SEP]"]
    for pairs, size in ((None, 2), (["a"], 3)):
        with pytest.raises(ValueError, match=f"max_length {size} leaves no room for text beside {size} special tokens"):
            encode_texts(bert, ["a"], pairs, max_length=size)
    with pytest.raises(ValueError, match="there are 2 texts, but 1 second ones"):
        encode_texts(bert, ["a", "b"], ["c"], max_length=9)
    assert encode_texts(bert, [], max_length=9) == []


def test_a_typed_separator_does_not_separate(every):
    for name, tokenizer in every.items():
        text = f"a {tokenizer.config.get('sep_token', '<|endoftext|>')} b"
        outputs = [
            encode_texts(tokenizer, [text], max_length=50)[0],
            encode_words(tokenizer, [text.split()], max_length=50)[0].inputs,
        ]
        outputs.append(encode_windows(tokenizer, ["a"], [text], max_length=50, overlap=0)[0].inputs)
        ends = {"bert": 1, "roberta": 1, "gpt2": 0}[name]
        separators = [(inputs["input_ids"] == (tokenizer.sep_id or tokenizer.eos_id)).sum() for inputs in outputs]
        assert separators == [ends, ends, {"bert": 2, "roberta": 3, "gpt2": 0}[name]]


# Words


def test_words_point_to_their_first_piece(bert):
    (encoded,) = encode_words(bert, [["w1", "piecework", "\u200b", "a", "", "b"]], max_length=50)
    assert shown(bert, encoded.inputs) == ["[CLS]", "w1", "piece", "##wo", "##rk", "a", "b", "[SEP]"]
    assert encoded.first.dtype == np.int32 and encoded.first.tolist() == [1, 2, -1, 5, -1, 6]


def test_words_beyond_the_limit_are_marked():
    # Five of six words fit; the sixth must still count as one.
    tokenizer = Tokenizer.train_wordpiece(["a b c d e f"] * 3, vocab_size=40)
    (encoded,) = encode_words(tokenizer, [list("abcdef")], max_length=7)
    assert encoded.first.tolist() == [1, 2, 3, 4, 5, -1] and len(encoded.inputs["input_ids"]) == 7


def test_a_word_whose_pieces_are_cut_keeps_its_first_one(bert):
    (encoded,) = encode_words(bert, [["w1", "piecework", "a"]], max_length=5)
    assert shown(bert, encoded.inputs) == ["[CLS]", "w1", "piece", "##wo", "[SEP]"]
    assert encoded.first.tolist() == [1, 2, -1]
    with pytest.raises(ValueError, match="max_length 2 leaves no room"):
        encode_words(bert, [["a"]], max_length=2)


def test_a_sentence_without_words_is_special_tokens(every):
    for tokenizer in every.values():
        encoded = encode_words(tokenizer, [[], ["a"], [" "]], max_length=9)
        assert [e.first.shape for e in encoded] == [(0,), (1,), (1,)] and encoded[2].first.tolist() == [-1]
        assert len(encoded[0].inputs["input_ids"]) == len(encoded[2].inputs["input_ids"]) == Template.of(tokenizer).size


WORD = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(words=st.lists(WORD | st.sampled_from(["'s", "don't", "</s>", "\u200b", "\u0301", "'"]), min_size=1, max_size=8))
def test_byte_level_words_are_spelled_as_in_running_text(roberta, bpe, words):
    (encoded,) = encode_words(bpe, [words], max_length=1000)
    assert encoded.inputs["input_ids"].tolist() == bpe.encode(" ".join(words))
    (framed,) = encode_words(roberta, [words], max_length=1000)
    assert framed.inputs["input_ids"][1:-1].tolist() == bpe.encode(" ".join(words))
    # The pieces from each first one to the next spell the word.
    for tokens, offset in ((encoded, 0), (framed, 1)):
        bounds = [*(tokens.first - offset), len(bpe.encode(" ".join(words)))]
        ids = tokens.inputs["input_ids"][offset:].tolist()
        spelled = [bpe.decode(ids[a:b]).strip(" ") for a, b in itertools.pairwise(bounds)]
        assert spelled == words


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from(["w1", "piecework", "\u200b", "a", "pieces", "b"]), max_size=12),
    limit=st.integers(3, 20),
)
def test_cut_words_are_a_prefix_of_whole_ones(bert, words, limit):
    (whole,), (cut,) = (encode_words(bert, [words], max_length=n) for n in (100, limit))
    assert len(cut.inputs["input_ids"]) == min(limit, len(whole.inputs["input_ids"]))
    assert cut.first.tolist() == [i if i < limit - 1 else -1 for i in whole.first.tolist()]


# Windows


def stretches(windows):
    return [(w.first_token, w.context_end - w.context_start) for w in windows]


@pytest.mark.parametrize(
    "overlap, expected",
    [
        (0, [(0, 114), (114, 43)]),
        (32, [(0, 114), (82, 75)]),
        (64, [(0, 114), (50, 107)]),
        (100, [(0, 114), (14, 114), (28, 114), (42, 114), (56, 101)]),
        # the original BERT's doc_stride of 32 and 64 is a step: an overlap of 114 - 32 and 114 - 64
        (114 - 32, [(0, 114), (32, 114), (64, 93)]),
        (114 - 64, [(0, 114), (64, 93)]),
    ],
)
def test_windows_lose_no_token(bert, overlap, expected):
    windows = encode_windows(bert, ["q " * 11], ["d " * 157], max_length=128, overlap=overlap)
    assert stretches(windows) == expected
    for window, (_, size) in zip(windows, expected, strict=True):
        assert shown(bert, window.inputs) == ["[CLS]", *"q" * 11, "[SEP]", *"d" * size, "[SEP]"]
        assert window.inputs["token_type_ids"].tolist() == [0] * 13 + [1] * (size + 1)
        assert window.context_start == 13
        assert window.offsets.tolist() == [
            [2 * i, 2 * i + 1] for i in range(window.first_token, window.first_token + size)
        ]


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 30), room=st.integers(1, 20), overlap=st.integers(0, 19), question=st.integers(1, 4))
@example(n=1, room=1, overlap=0, question=1)
def test_every_stretch_up_to_the_overlap_is_whole_in_some_window(bert, n, room, overlap, question):
    overlap = min(overlap, room - 1)
    text = "d " * n
    windows = encode_windows(bert, ["q " * question], [text], max_length=3 + question + room, overlap=overlap)
    starts, sizes = zip(*stretches(windows), strict=True)
    assert len(windows) == 1 or max(sizes) == room
    assert starts[-1] + sizes[-1] == n
    for before, after, size in zip(starts, starts[1:], sizes, strict=False):
        assert before + size - after == overlap  # the tokens that neighbours share
    for first in range(n):
        for last in range(first, min(n, first + overlap + 1)):
            spans = [token_span(window, 2 * first, 2 * last + 1) for window in windows]
            held = [(w, span) for w, span in zip(windows, spans, strict=True) if span]
            assert held
            for window, span in held:
                assert char_span(window, *span) == (2 * first, 2 * last + 1)


def test_windows_know_their_question_and_share_their_context(bert):
    windows = encode_windows(bert, ["q", "q q", "w1"], ["a b", "d " * 9, "a b"], max_length=10, overlap=1)
    assert [w.example for w in windows] == [0, 1, 1, 2]
    assert windows[0].context is windows[3].context
    assert shown(bert, windows[3].inputs) == ["[CLS]", "w1", "[SEP]", "a", "b", "[SEP]"]
    (empty,) = encode_windows(bert, ["q"], [" "], max_length=10, overlap=1)
    assert empty.context_start == empty.context_end and token_span(empty, 0, 1) is None


def test_windows_without_room_are_refused(bert):
    questions, contexts = ["q", "q q q q q q"], ["a", "b"]
    message = (
        r"question 1 \('q q q q q q'\) has 6 tokens, but in windows of max_length 12 with 3 special tokens and an "
    )
    with pytest.raises(ValueError, match=message + "overlap of 3 there is room for 5; shorten it, raise max_length"):
        encode_windows(bert, questions, contexts, max_length=12, overlap=3)
    assert len(encode_windows(bert, questions, contexts, max_length=13, overlap=3)) == 2
    for overlap in (-1, 8, 128):
        with pytest.raises(ValueError, match=f"windows of max_length 12 cannot overlap by {overlap} tokens: 3 special"):
            encode_windows(bert, questions, contexts, max_length=12, overlap=overlap)
    with pytest.raises(ValueError, match="max_length 3 leaves no room for text beside 3 special tokens"):
        encode_windows(bert, questions, contexts, max_length=3, overlap=0)
    with pytest.raises(ValueError, match="there are 2 questions, but 1 contexts"):
        encode_windows(bert, questions, ["a"], max_length=12, overlap=0)


def recovered(window, context, start, answer):
    span = token_span(window, start, start + len(answer))
    assert span is not None
    begin, end = char_span(window, *span)
    return context[begin:end]


def test_answers_keep_blanks_accents_and_case(tmp_path):
    tokenizer = wordpiece(tmp_path, "the", "cafe", "in", "zurich", "opened", "1995", ".", "when")
    context = "  The café in Zürich opened in 1995."
    (window,) = encode_windows(tokenizer, ["when"], [context], max_length=32, overlap=8)
    assert (len(context), context.index("café"), context.index("1995")) == (36, 6, 31)
    assert shown(tokenizer, window.inputs)[window.context_start :][1:4] == ["cafe", "in", "zurich"]
    assert recovered(window, context, 6, "café in Zürich") == "café in Zürich"
    assert recovered(window, context, 31, "1995") == "1995"
    assert recovered(window, context, 2, "The café in Zürich opened in 1995.") == context[2:]
    decomposed = context.replace("é", "e\u0301").replace("ü", "u\u0308")
    (window,) = encode_windows(tokenizer, ["when"], [decomposed], max_length=32, overlap=8)
    assert recovered(window, decomposed, 6, "cafe\u0301 in Zu\u0308rich") == "cafe\u0301 in Zu\u0308rich"


def test_answers_over_unknown_characters(tmp_path):
    tokenizer = wordpiece(tmp_path, *"他说：世界，然后。", "when")
    context = "他说：“你好，世界”，然后。"
    (window,) = encode_windows(tokenizer, ["when"], [context], max_length=32, overlap=8)
    assert shown(tokenizer, window.inputs)[window.context_start :].count("[UNK]") == 4
    for answer in ("“你好，世界”", "你好", "“", "世界"):
        assert recovered(window, context, context.index(answer), answer) == answer


@pytest.mark.parametrize("trimmed", [True, False])
@pytest.mark.parametrize("prefix_space", [True, False])
def test_answers_of_byte_level_tokens_begin_with_their_first_letter(bpe, prefix_space, trimmed):
    backend = tokenizers.Tokenizer.from_str(bpe.backend.to_str())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trimmed)
    tokenizer = Tokenizer(backend, config={})
    context = "Anna lives in Amsterdam"
    (window,) = encode_windows(tokenizer, ["where"], [context], max_length=64, overlap=8)
    for answer in ("Amsterdam", "Anna", "lives in"):
        assert recovered(window, context, context.index(answer), answer) == answer


def test_blanks_alone_are_no_answer(bpe):
    context = "a \n\n  b"
    (window,) = encode_windows(bpe, ["q"], [context], max_length=64, overlap=8)
    assert token_span(window, 1, 5) is None
    first, last = window.context_start, window.context_end - 1
    assert char_span(window, first, last) == (0, 7)
    assert char_span(window, first, last - 1) == (0, 1)  # the blanks after "a" add nothing
    begin, end = char_span(window, first + 1, first + 1)
    assert begin == end
    for span in ((last, first), (first - 1, last), (first, last + 1)):
        with pytest.raises(ValueError, match=r"are no stretch of the context, which has the positions"):
            char_span(window, *span)


@pytest.mark.parametrize("folder", ["minilm_l6", "tok_gpt2"])
def test_every_gold_answer_comes_back(shared_data, folder):
    tokenizer = Tokenizer.load(shared_data / folder)
    articles = json.loads((shared_data / "xquad/xquad.en.json").read_text("utf-8"))["data"]
    paragraphs = [p for article in articles for p in article["paragraphs"]]
    cases = [(p["context"], q["question"], q["answers"][0]) for p in paragraphs for q in p["qas"]]
    contexts, questions, answers = zip(*cases, strict=True)
    assert len(cases) == 1190
    windows = encode_windows(tokenizer, questions, contexts, max_length=192, overlap=64)
    assert len(windows) > 1500
    whole, exact = set(), 0
    for window in windows:
        context, gold = contexts[window.example], answers[window.example]["text"]
        start = answers[window.example]["answer_start"]
        span = token_span(window, start, start + len(gold))
        if span is None:
            continue
        begin, end = char_span(window, *span)
        assert begin <= start and start + len(gold) <= end
        borders = window.context.offsets
        if start in borders[:, 0] and start + len(gold) in borders[:, 1]:
            assert context[begin:end] == gold
            exact += window.example not in whole
        whole.add(window.example)
    assert whole == set(range(1190))
    assert exact >= 1190 - 13  # the rest end inside a token, such as GPT-2's '",'


# Words of running text


def words(text):
    return [text[start:end] for start, end in split_words(text)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("EU rejects German call.", "EU|rejects|German|call|."),
        ("John's e-mail cost $1,500...", "John|'s|e-mail|cost|$|1,500|..."),
        ("O'Brien doesn't like the U.S. (\"no\")", "O'Brien|doesn't|like|the|U.S.|(|\"|no|\"|)"),
        ("@anna: #news at 10:30, 1996-08-22 a@b", "@anna|:|#news|at|10:30|,|1996-08-22|a|@|b"),
        ("JOHN’S ‘x’ -- 'n'", "JOHN|’S|‘|x|’|--|'|n|'"),
        ("naïve cafe\u0301 हिन्दी 你好，世界", "naïve|cafe\u0301|हिन्दी|你好|，|世界"),
        ("  \t\n\u3000\u00a0\u200b ", ""),
        ("a\u00adb \u200bc \u263a\ufe0f \U0001f600", "a\u00adb|c|\u263a\ufe0f|\U0001f600"),
        ("", ""),
    ],
)
def test_text_is_split_as_entity_data_is(text, expected):
    assert words(text) == ([] if not expected else expected.split("|"))


SIGNS = st.sampled_from(list("aé_1 \t\n.,:'’-@#s()\u200b\u00ad\u0301\u3000\ufeff你\U0001f600"))


UNICODE = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(max_examples=300, deadline=None)
@given(text=st.text(SIGNS, max_size=30) | UNICODE)
def test_words_are_exact_slices_and_cover_what_is_visible(text):
    spans = split_words(text)
    borders = [0, *(i for span in spans for i in span), len(text)]
    assert borders == sorted(borders) and all(start < end for start, end in spans)
    assert not any(c.isspace() for word in words(text) for c in word)
    between = "".join(text[a:b] for a, b in zip(borders[::2], borders[1::2], strict=True))
    assert not any(c.isalnum() or c in ".,:'-@#()" for c in between)
    assert words(" ".join(words(text))) == words(text)


def test_most_words_of_entity_data_stay_whole(shared_data):
    lines = (shared_data / "wnut17/wnut17train.conll").read_text("utf-8").splitlines()
    entities = [line.split("\t")[0] for line in lines if line.strip() and not line.endswith("\tO")]
    assert len(entities) > 3000
    assert sum(len(split_words(word)) == 1 for word in entities) / len(entities) > 0.98
