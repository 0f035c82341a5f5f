"""Translation: the loss by its formula, decoder inputs from labels, sacreBLEU's figures, and that it learns."""

import dataclasses
import io
import json
import math
import random
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu
import tokenizers
from flax import nnx
from tiny_tasks import training

from transformers_jax.cli import main
from transformers_jax.data import Tokenizer, TranslationData
from transformers_jax.loading import evaluate, load
from transformers_jax.models import BertConfig, EncoderDecoderConfig, Seq2SeqLanguageModel
from transformers_jax.models.output import ModelOutput
from transformers_jax.planning.plan import configured
from transformers_jax.running import run
from transformers_jax.tasks import Translation, task_of

CONFIG = EncoderDecoderConfig.marian(
    vocab_size=None, max_length=64, dim=48, depth=1, heads=4, mlp_dim=96, dropout=0.0, attention_dropout=0.0
)
WORDS = {
    "der": "the",
    "hund": "dog",
    "katze": "cat",
    "rennt": "runs",
    "sieht": "sees",
    "und": "and",
    "ball": "ball",
    "rot": "red",
    "haus": "house",
    "geht": "walks",
}


def sentences(count, seed):
    chosen = random.Random(seed)
    for _ in range(count):
        words = chosen.choices(sorted(WORDS), k=chosen.randint(1, 6))
        yield " ".join(words), " ".join(WORDS[word] for word in words)


def write_pairs(folder, name, pairs):
    sources, targets = zip(*pairs, strict=True)
    for suffix, lines in (("de", sources), ("en", targets)):
        (folder / f"{name}.{suffix}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(folder / f"{name}.de"), str(folder / f"{name}.en")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    source, target = write_pairs(folder, "train", sentences(600, 0))
    held_out = write_pairs(folder, "val", sentences(40, 1))
    return TranslationData(
        source=source, target=target, validation_source=held_out[0], validation_target=held_out[1], vocab_size=120
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, data):
    """A run that learned to translate word by word."""
    workdir = tmp_path_factory.mktemp("runs") / "words"
    task = Translation(length=32, label_smoothing=0.1, sample_text="der hund rennt")
    experiment = training(task, data, steps=400, batch_size=8, learning_rate=4e-3, model=CONFIG)
    budget = dataclasses.replace(experiment.training, batch_tokens=32 * 48, eval_batch_size=16)
    result = run(dataclasses.replace(experiment, training=budget), workdir)
    assert result.sample == "the dog runs"
    return workdir


# --- the loss


class Echo(nnx.Module):
    """The logits after a token are a row of `table`, and the config starts targets with `start`."""

    def __init__(self, table, start):
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))
        self.config = SimpleNamespace(start=start)

    def __call__(self, input_ids, attention_mask, *, decoder_input_ids, key=None):
        return ModelOutput(hidden=decoder_input_ids, logits=self.table[...][decoder_input_ids])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_of_each_token_after_the_one_before(smoothing):
    table = np.random.default_rng(0).normal(size=(7, 7))
    labels = np.array([[4, 2, 1], [5, 1, -100]])
    batch = {"input_ids": np.zeros((2, 3), np.int32), "attention_mask": np.ones((2, 3), np.int32), "labels": labels}
    model, task = Echo(table, start=6), Translation(label_smoothing=smoothing)
    loss, tokens = task.loss(model, jax.tree.map(jnp.asarray, batch))
    log = table - np.log(np.exp(table).sum(-1, keepdims=True))
    places = [(6, 4), (4, 2), (2, 1), (6, 5), (5, 1)]  # (token before, label): the start comes first
    expected = sum((1 - smoothing) * -log[place] + smoothing * -log[place[0]].mean() for place in places)
    assert (float(loss), float(tokens)) == (pytest.approx(expected, rel=1e-5), 5.0)
    sums, _ = jax.jit(task.evaluate)(FixedWriter(table, 6), batch)
    assert float(sums["loss"]) == pytest.approx(sum(-log[place] for place in places), rel=1e-5)


class FixedWriter(Echo):
    """Writes token 1, the end, at once."""

    def __init__(self, table, start):
        super().__init__(table, start)
        self.config = SimpleNamespace(start=start, max_length=8, eos_id=1, pad_id=0, vocab_size=7)

    def condition(self, input_ids, attention_mask):
        return EndAtOnce(self.config)


class EndAtOnce(nnx.Module):
    def __init__(self, config):
        self.config = config

    def init_cache(self, batch, length):
        return jnp.zeros((batch, 1))

    def __call__(self, input_ids, attention_mask=None, *, cache, logits_to_keep=None):
        logits = jnp.zeros((len(input_ids), 1, self.config.vocab_size)).at[..., 1].set(1.0).at[..., 0].set(9.0)
        return SimpleNamespace(logits=logits, cache=cache)


@pytest.mark.parametrize("beams", [1, 3])
def test_padding_is_never_written(beams):
    task = Translation(beams=beams)
    batch = {"input_ids": np.ones((2, 4), np.int32), "attention_mask": np.ones((2, 4), np.int32)}
    if beams == 1:
        rows = jax.jit(task.rows)(FixedWriter(np.zeros((7, 7)), 6), batch)
        assert rows["tokens"][:, 0, 0].tolist() == [1, 1] and rows["lengths"].tolist() == [[1], [1]]
    config = dataclasses.replace(CONFIG, vocab_size=11, pad_id=0, eos_id=1)
    model = Seq2SeqLanguageModel(config.build(rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    model.bias[...] = model.bias[...].at[0].set(50.0)  # by far the likeliest, everywhere
    rows = jax.jit(task.rows)(model, batch)
    for tokens, lengths in zip(rows["tokens"], rows["lengths"], strict=True):
        assert 0 not in np.asarray(tokens[0, : lengths[0]])


# --- a run


@pytest.mark.slow
def test_it_learns_and_its_figures_are_sacrebleus(workdir, data, tmp_path):
    loaded = load(workdir)
    metrics = evaluate(loaded, batch_size=16, report=tmp_path)
    assert metrics["bleu"] > 90
    lines = [json.loads(line) for line in (tmp_path / "translations.jsonl").read_text().splitlines()]
    assert [line["bleu"] for line in lines] == sorted(line["bleu"] for line in lines) and len(lines) == 40
    written, references = [line["translation"] for line in lines], [[line["reference"] for line in lines]]
    assert metrics["bleu"] == pytest.approx(sacrebleu.corpus_bleu(written, references).score)
    assert metrics["chrf"] == pytest.approx(sacrebleu.corpus_chrf(written, references).score)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"])) and metrics["sentences"] == 40
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp" in loaded.task.scoring_rule()
    beams = evaluate(load(workdir, settings={"beams": 4}), batch_size=7)
    assert beams["bleu"] > 90 and beams["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_predictions_alone_are_those_among_others(workdir):
    loaded = load(workdir, settings={"beams": 3, "n_best": 2})
    texts = ["der hund", "katze und haus sieht rot ball", {"text": "haus"}, "der ball rennt"]
    together = loaded.predict(texts)
    assert [one["translations"][0]["translation"] for one in together] == [
        "the dog",
        "cat and house sees red ball",
        "house",
        "the ball runs",
    ]
    for text, found in zip(texts, together, strict=True):
        (alone,) = loaded.predict([text])
        for mine, other in zip(alone["translations"], found["translations"], strict=True):
            assert mine["translation"] == other["translation"]
            assert mine["score"] == pytest.approx(other["score"], abs=2e-5)
        assert alone["translations"][0]["score"] >= alone["translations"][1]["score"]


def test_a_converted_run_translates_alike(workdir, tmp_path):
    loaded = load(workdir)
    loaded.save_pretrained(tmp_path / "marian")
    again = load(tmp_path / "marian")
    assert isinstance(task_of(again.model), Translation)
    texts = ["der hund rennt", "katze und ball"]
    assert again.predict(texts) == loaded.predict(texts)


def test_translate_gives_a_line_for_a_line(workdir, monkeypatch, capsys, tmp_path):
    typed = "der hund\n\n  \nkatze und haus\n"
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(typed.encode()), isatty=lambda: False))
    with pytest.raises(SystemExit) as end:
        main(["translate", "--checkpoint", str(workdir), "--batch-size", "2"])
    assert (end.value.code, capsys.readouterr().out) == (0, "the dog\n\n\ncat and house\n")
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("haus\nder ball")
    with pytest.raises(SystemExit) as end:
        files = ["--input", str(source), "--output", str(output)]
        main(["translate", "--checkpoint", str(workdir), *files, "--n-best", "2", "--beams", "3"])
    lines = [line.split(" ||| ") for line in output.read_text().splitlines()]
    assert [line[0] for line in lines] == ["0", "0", "1", "1"]
    assert (lines[0][1], lines[2][1]) == ("house", "the ball") and float(lines[0][2]) >= float(lines[1][2])


def test_long_sources_are_cut_with_a_word_about_it(workdir, capsys, tmp_path):
    (tmp_path / "in.txt").write_text("haus " * 80 + "\nhaus\n")
    with pytest.raises(SystemExit) as end:
        main(["translate", "--checkpoint", str(workdir), "--input", str(tmp_path / "in.txt"), "--beams", "1"])
    printed = capsys.readouterr()
    assert end.value.code == 0 and len(printed.out.splitlines()) == 2
    assert "1 of 2 lines are longer than the model reads and were cut" in printed.err
    cut, whole = load(workdir).predict(["haus " * 80, "haus"])
    assert cut["cut"] == 32 and "cut" not in whole


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    assert end.value.code == 2
    return capsys.readouterr().err


def test_mistakes(workdir, capsys, tmp_path):
    translate, score = ((name, "--checkpoint", workdir) for name in ("translate", "evaluate"))
    (tmp_path / "latin.txt").write_bytes(b"h\xe4user\n")
    assert "is not valid UTF-8" in fails(capsys, *translate, "--input", tmp_path / "latin.txt")
    assert "no such file" in fails(capsys, *translate, "--input", tmp_path / "nothing.txt")
    assert "--n-best 5 must be between 1 and --beams 4" in fails(capsys, *translate, "--n-best", "5")
    assert "--batch-size 0" in fails(capsys, *translate, "--batch-size", "0")
    source, target = write_pairs(tmp_path, "test", [("haus", "house"), ("", "")])
    assert "the source and the target are empty" in fails(capsys, *score, "--data", source, "--target", target)
    (tmp_path / "test.en").write_text("house\n")
    assert "test.de has 2 lines, but" in fails(capsys, *score, "--data", source, "--target", target)
    assert "--target, --columns and --skip-bad describe --data" in fails(capsys, *score, "--target", target)


def test_evaluate_on_other_files(workdir, capsys, tmp_path):
    source, target = write_pairs(tmp_path, "test", sentences(10, 5))
    with pytest.raises(SystemExit) as end:
        main(["evaluate", "--checkpoint", str(workdir), "--data", source, "--target", target])
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == 0 and found["sentences"] == 10 and found["bleu"] > 90
    assert found["scoring"].startswith("sacreBLEU: BLEU nrefs:1")


# --- preparing


def test_long_pairs_are_left_out_of_training_and_cut_in_evaluation(data, tmp_path, caplog):
    train = write_pairs(tmp_path, "train", [*sentences(50, 0), ("haus " * 60, "house")])
    held_out = write_pairs(tmp_path, "val", [("hund", "dog"), ("haus " * 60, "house")])
    files = dict(source=train[0], target=train[1], validation_source=held_out[0], validation_target=held_out[1])
    examples = Translation(length=32).prepare(dataclasses.replace(data, **files), CONFIG)
    assert len(examples.train) == 50 and "1 longer than 32 tokens left out" in examples.facts["pairs"]
    assert "1 of 2 held-out pairs are longer than 32 tokens and are cut there" in caplog.text
    long = examples.validation.dataset[1]["input_ids"]
    assert len(long) == 32 and long[-1] == examples.processor.eos_id
    with pytest.raises(ValueError, match="pairs are longer than 1 tokens"):
        Translation(length=1).prepare(data, CONFIG)


def test_the_tokenizer_is_one_for_both_languages(data):
    examples = Translation().prepare(data, CONFIG)
    tokenizer: Tokenizer = examples.processor
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)
    config = Translation().configure(CONFIG, examples)
    assert (config.vocab_size, config.start, config.eos_id) == (tokenizer.vocab_size, 0, 1)
    row = examples.train.dataset[0]
    first = next(sentences(1, 0))
    assert tokenizer.decode(row["input_ids"][:-1].tolist()).strip() == first[0]
    assert tokenizer.decode(row["labels"][:-1].tolist()).strip() == first[1]
    assert row["input_ids"][-1] == row["labels"][-1] == 1


def test_a_prefix_stands_before_every_source(data):
    tokenizer = Translation().prepare(data, CONFIG).processor
    task = Translation(prefix="der ")
    assert (
        task.prepare(data, CONFIG, tokenizer).fingerprint != Translation().prepare(data, CONFIG, tokenizer).fingerprint
    )
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size, eos_id=1, pad_id=0)
    (row,) = (task.features(["hund"], tokenizer, config).dataset.dataset[i]["input_ids"] for i in [0])
    assert tokenizer.decode(row[:-1].tolist()).strip() == "der hund"


def test_texts_stand_between_the_tokens_that_the_tokenizer_puts_around_them(data, tmp_path):
    """BART's: <s> before and </s> after, of sources and targets, cut ones too."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *WORDS, *WORDS.values()]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))})
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    backend.save(str(tmp_path / "tokenizer.json"))
    names = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", cls_token="<s>", sep_token="</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.load(tmp_path)
    examples = Translation(length=5).prepare(data, CONFIG, tokenizer)
    for dataset in (examples.train.dataset, examples.validation.dataset):
        for i in range(10):
            for ids in dataset[i].values():
                assert ids[0] == 0 and ids[-1] == 2 and 2 not in ids[:-1]
    features = Translation(length=5).features(["der hund sieht und geht", "rot"], tokenizer, CONFIG)
    first, second = (features.dataset.dataset[i]["input_ids"].tolist() for i in range(2))
    assert first == [0, *tokenizer.encode("der hund sieht"), 2] and second == [0, *tokenizer.encode("rot"), 2]
    assert features.extra["cut"].tolist() == [True, False]


def test_a_target_vocabulary_that_does_not_hold_the_tokenizers(data):
    examples = Translation().prepare(data, CONFIG)
    size = examples.processor.vocab_size
    config = dataclasses.replace(CONFIG, vocab_size=size, target_vocab_size=size - 1)
    with pytest.raises(
        ValueError, match=f"target's tokenizer has {size} tokens but model.target_vocab_size is {size - 1}"
    ):
        Translation().configure(config, examples)


def test_settings_that_make_no_sense(data):
    for settings, message in [
        (dict(label_smoothing=1.0), "label_smoothing=1.0"),
        (dict(beams=2, n_best=3), "n_best=3 must be between 1 and task.beams=2"),
        (dict(length_penalty=math.inf), "must be finite"),
        (dict(length=0), "length=0 must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            Translation(**settings)
    with pytest.raises(ValueError, match=r"bleu_tokenize='moses' is none of sacreBLEU's: 13a, .*intl"):
        Translation(bleu_tokenize="moses").prepare(data, CONFIG)
    with pytest.raises(ValueError, match="translation needs an encoder-decoder, not a BertConfig"):
        examples = Translation().prepare(data, CONFIG)
        Translation().configure(BertConfig.tiny(), examples)
    with pytest.raises(ValueError, match="input 1 is empty"):
        Translation().features(["haus", " "], examples.processor, CONFIG)


def test_a_plan_counts_the_longest_batch_that_the_tokens_hold(data):
    experiment = training(Translation(length=32), data, model=dataclasses.replace(CONFIG, vocab_size=64))
    budget = dataclasses.replace(experiment.training, batch_size=4, batch_tokens=1000)
    planned = configured(dataclasses.replace(experiment, training=budget))
    assert planned.training.batch_size == 28 and planned.training.batch_tokens is None
