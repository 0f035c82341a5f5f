"""The commands as a person meets them: what they print, and that a mistake is one line and exit code 2."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

import transformers_jax.running
from transformers_jax.cli import _main as run_command
from transformers_jax.data import Tokenizer
from transformers_jax.loading import load
from transformers_jax.models import BertConfig
from transformers_jax.pretrained import save_pretrained
from transformers_jax.training.chips import CHIPS

ROOT = Path(__file__).parents[1]
TEXT = "".join(f"{i} plus {i} is {2 * i}.\n" for i in range(500))
SMALL = [
    *("--training.steps", "4", "--training.batch-size", "8", "--training.log-every", "2"),
    *(
        "--model.dim",
        "16",
        "--model.depth",
        "2",
        "--model.heads",
        "2",
        "--model.max-length",
        "32",
        "--model.unroll",
        "1",
    ),
    *("--data.tokenizer", "character", "--task.sample-tokens", "10", "--mesh.devices", "1"),
]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, text_file):
    """A run trained by the command."""
    path = tmp_path_factory.mktemp("runs") / "run"
    arguments = ["--config", "gpt_python_docs", "--workdir", str(path), "--data.source", str(text_file)]
    assert run_command(["train", *arguments, *SMALL]) == 0
    return path


def fails(capsys, *arguments):
    """The one line of a command that fails with exit code 2."""
    assert run_command(list(arguments)) == 2
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in printed.out
    return lines[0]


def test_training_leaves_metrics_settings_tokenizer_and_checkpoint(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [2, 4]
    assert {"learning_rate", "grad_norm", "tokens_per_second", "data_wait"} <= set(lines[0])
    assert {"eval/loss", "eval/perplexity", "eval/bits_per_byte"} <= set(lines[-1])
    settings = json.loads((workdir / "experiment.json").read_text())["experiment"]
    assert settings["model"]["dim"] == 16 and settings["model"]["vocab_size"] == len(set(TEXT))
    assert Tokenizer.load(workdir / "tokenizer").vocab_size == len(set(TEXT))
    assert load(workdir).step == 4


def test_training_says_how_well_the_devices_are_used_and_traces_steps_on_request(
    workdir, text_file, tmp_path, capsys, monkeypatch
):
    def lines(workdir):
        found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in found if "loss" in line]

    assert not any("mfu" in line for line in lines(workdir))  # nobody knows the peak of this CPU
    arguments = ["train", "--config", "gpt_python_docs", "--workdir", str(tmp_path / "run"), *SMALL]
    arguments += ["--data.source", str(text_file), "--training.log-every", "1"]
    monkeypatch.setattr(transformers_jax.running, "chip_of", lambda device: CHIPS["a100"])
    assert run_command([*arguments, "--training.profile-steps", "3", "4"]) == 0
    out = capsys.readouterr().out
    assert "a device does at most 1.56e+14 a second" in out  # float32, through TF32
    assert f"steps 3 to 4 are traced in {tmp_path / 'run/profile'}" in out
    assert len(list((tmp_path / "run/profile/plugins/profile").glob("*/*.xplane.pb"))) == 1
    assert run_command([*arguments, "--training.steps", "6", "--training.peak-flops", "5e10"]) == 0
    assert "changed since the run began: training.peak_flops None -> 50000000000.0" in capsys.readouterr().out

    config = load(tmp_path / "run").model.config
    for line, peak in zip(lines(tmp_path / "run"), [156e12] * 4 + [5e10] * 2, strict=True):
        assert line["tokens_per_second_per_device"] == line["tokens_per_second"]
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * config.flops_per_token(32) / peak, rel=1e-6)


def test_evaluate_repeats_what_training_measured(workdir, capsys):
    assert run_command(["evaluate", "--checkpoint", str(workdir)]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert found["loss"] == pytest.approx(lines[-1]["eval/loss"], rel=1e-5) and found["step"] == 4


def test_evaluate_scores_the_whole_of_a_text_that_is_named(workdir, text_file, capsys):
    assert run_command(["evaluate", "--checkpoint", str(workdir), "--data", str(text_file)]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == len(TEXT) - 1


def test_generate_writes_the_prompt_and_the_same_text_for_the_same_seed(workdir, capsys):
    command = ["generate", "--checkpoint", str(workdir), "--prompt", "12 plus", "--max-new-tokens", "9"]
    texts = []
    for seed in ("0", "0", "1"):
        assert run_command([*command, "--seed", seed, "--samples", "2"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    first, second = texts[0].split("12 plus")[1:]
    assert len(first) == len(second) == 10 and first != second


def test_generate_with_beams_prints_as_many_texts_as_asked_for(workdir, capsys):
    command = ["generate", "--checkpoint", str(workdir), "--prompt", "12 plus", "--max-new-tokens", "5"]
    assert run_command([*command, "--beams", "3", "--samples", "2"]) == 0
    assert capsys.readouterr().out.count("12 plus") == 2


def test_convert_writes_what_every_command_reads(workdir, tmp_path, capsys):
    assert run_command(["convert", "--checkpoint", str(workdir), "--output", str(tmp_path / "hf")]) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "hf").iterdir()}
    command = ["generate", "--prompt", "3 plus", "--max-new-tokens", "8", "--temperature", "0", "--checkpoint"]
    capsys.readouterr()
    assert run_command([*command, str(workdir)]) == 0
    expected = capsys.readouterr().out
    assert run_command([*command, str(tmp_path / "hf")]) == 0
    assert capsys.readouterr().out == expected


def test_mistakes_in_the_command_line(capsys, tmp_path):
    assert "unknown command 'trian'; there are train, evaluate" in fails(capsys, "trian")
    assert "needs --config" in fails(capsys, "train")
    assert "no config 'gpt_5'; give a path, or one of" in fails(capsys, "train", "--config", "gpt_5")
    config = ["train", "--config", "gpt_python_docs", "--workdir", str(tmp_path / "run")]
    message = fails(capsys, *config, "--training.stpes", "5")
    assert message.startswith("error: Unrecognized options: --training.stpes") and "---" not in message
    (tmp_path / "wrong.py").write_text("def experiment():\n    return GPTConfig(dims=3)\n")
    assert "wrong.py: NameError" in fails(capsys, "train", "--config", str(tmp_path / "wrong.py"))
    (tmp_path / "wrong.txt").write_text("text")
    assert "is not a Python file" in fails(capsys, "train", "--config", str(tmp_path / "wrong.txt"))
    assert "seed=-1" in fails(capsys, *config, "--seed", "-1")
    (tmp_path / "file").write_text("")
    arguments = ["train", "--config", "gpt_python_docs", "--workdir", str(tmp_path / "file"), *SMALL]
    assert "is a file" in fails(capsys, *arguments)
    assert "--training.steps" in fails(capsys, *config, "--training.steps", "many")
    assert "dim=190 is not a multiple of heads=6" in fails(capsys, *config, "--model.dim", "190")
    assert "steps=0 must be at least 1" in fails(capsys, *config, "--training.steps", "0")
    assert not (tmp_path / "run").exists()


def test_mistakes_in_the_text(capsys, tmp_path):
    config = ["train", "--config", "gpt_python_docs", "--workdir", str(tmp_path / "run"), *SMALL]
    assert "missing.txt" in fails(capsys, *config, "--data.source", str(tmp_path / "missing.txt"))
    (tmp_path / "latin.txt").write_bytes(b"abc d\xe9f " * 50)
    message = fails(capsys, *config, "--data.source", str(tmp_path / "latin.txt"))
    assert "latin.txt" in message and "UTF-8" in message and "byte 5" in message
    (tmp_path / "empty.txt").write_text("")
    assert "empty" in fails(capsys, *config, "--data.source", str(tmp_path / "empty.txt"))
    (tmp_path / "short.txt").write_text("0123456789")
    message = fails(capsys, *config, "--data.source", str(tmp_path / "short.txt"))
    assert "9 tokens" in message and "33" in message


def test_mistakes_with_a_checkpoint_leave_it_as_it_was(capsys, workdir, tmp_path, text_file):
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    train = ["train", "--config", "gpt_python_docs", "--workdir", str(workdir), "--data.source", str(text_file), *SMALL]
    assert "model.depth 2 -> 3" in fails(capsys, *train, "--model.depth", "3")
    generate = ["generate", "--checkpoint", str(workdir), "--prompt"]
    assert "temperature" in fails(capsys, *generate, "1", "--temperature", "-1")
    assert "top_k" in fails(capsys, *generate, "1", "--top-k", "0")
    message = fails(capsys, *generate, "1 plus 2", "--max-new-tokens", "30")
    assert "38 positions are needed (8 in the prompt + 30 new) but this model has 32" in message
    assert "'Z'" in fails(capsys, *generate, "Z")
    assert "not valid UTF-8" in fails(capsys, *generate, "1\udcff")
    output = ["--output", str(workdir)]
    assert "working directory of a run" in fails(capsys, "convert", "--checkpoint", str(workdir), *output)
    assert "neither" in fails(capsys, "generate", "--checkpoint", str(tmp_path), "--prompt", "1")
    assert "there is no directory" in fails(capsys, "evaluate", "--checkpoint", str(tmp_path / "nowhere"))
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        run_command(["evaluate", "--checkpoint", str(tmp_path / "nowhere"), "--debug"])


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "generate", "convert"])
def test_help_is_there_for_each_command(command):
    output = subprocess.run(
        [sys.executable, "-m", "transformers_jax.cli", command, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert output.returncode == 0 and f"usage: transformers-jax {command}" in output.stdout, output.stderr
    assert "--debug" in output.stdout


# Fine-tuned models

TINY = [
    *("--model.dim", "16", "--model.depth", "1", "--model.heads", "2", "--model.max-length", "32"),
    *("--task.length", "32", "--data.vocab-size", "200", "--training.batch-size", "8", "--mesh.devices", "1"),
]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    path = tmp_path_factory.mktemp("reviews") / "reviews.csv"
    rows = [f"film {i} is {what},{label}" for i in range(20) for what, label in (("bright", "good"), ("dull", "bad"))]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, reviews):
    path = tmp_path_factory.mktemp("runs") / "classifier"
    arguments = ["--config", "bert_classify", "--workdir", str(path), "--data.source", str(reviews)]
    assert run_command(["train", *arguments, *TINY, "--training.steps", "3"]) == 0
    return path


def predict(capsys, classifier, *arguments):
    capsys.readouterr()
    assert run_command(["predict", "--checkpoint", str(classifier), *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_steps_on_the_command_line_replace_the_epochs_of_a_config(classifier):
    lines = [json.loads(line) for line in (classifier / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 3 and "eval/accuracy" in lines[-1]


def test_predictions_are_the_same_from_lines_json_tables_and_standard_input(classifier, tmp_path, capsys, monkeypatch):
    texts = ["film 3 is bright", "a dull day", "bright"]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "a.csv").write_text("number,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(texts)))
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts]))
    expected = load(classifier).predict(texts)
    assert [set(one["probabilities"]) for one in expected] == [{"good", "bad"}] * 3
    for name in ("a.txt", "a.jsonl", "a.csv", "a.json"):
        for batch_size in ("1", "2", "32"):
            found = predict(capsys, classifier, "--input", str(tmp_path / name), "--batch-size", batch_size)
            assert [one["label"] for one in found] == [one["label"] for one in expected]
            for one, other in zip(found, expected, strict=True):
                assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(texts).encode()), encoding="latin-1"))
    assert len(predict(capsys, classifier, "--input", "-")) == 3
    out = tmp_path / "out.jsonl"
    assert predict(capsys, classifier, "--input", str(tmp_path / "a.txt"), "--output", str(out)) == []
    assert len(out.read_text().splitlines()) == 3


def test_a_broken_input_is_named_before_anything_is_written(classifier, tmp_path, capsys):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    out.write_text("precious")
    good = json.dumps({"text": "bright"})
    for bad, message in [
        ("", "in.jsonl, line 70 is empty"),
        ("{", "in.jsonl, line 70: "),
        (json.dumps({"x": 1}), "line 70 is {'x': 1}, not a text"),
        (json.dumps({"text": "a", "pair": 5}), "line 70 is {'text': 'a', 'pair': 5}, not a text"),
        (json.dumps({"text": "\ud800"}), "line 70 is not valid Unicode"),
    ]:
        path.write_text("\n".join([good] * 69 + [bad, good]) + "\n")
        line = fails(capsys, "predict", "--checkpoint", str(classifier), "--input", str(path), "--output", str(out),
                     "--batch-size", "1")  # fmt: skip
        assert message in line and out.read_text() == "precious"
        assert len(predict(capsys, classifier, "--input", str(path), "--skip-bad")) == 70
    path.write_text("")
    assert "holds no input" in fails(capsys, "predict", "--checkpoint", str(classifier), "--input", str(path))
    assert "no such file" in fails(capsys, "predict", "--checkpoint", str(classifier), "--input", str(tmp_path / "x"))


def test_a_single_text_is_read_alike_beside_pairs(classifier):
    loaded = load(classifier)

    def ids(*inputs):
        dataset = loaded.task.features(inputs, loaded.processor, loaded.model.config).dataset.dataset
        return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]

    (alone,) = ids("bright film")
    (pair,) = ids(("dull", "day"))
    assert ids("bright film", ("dull", "day"), "bright film") == [alone, pair, alone]
    assert pair.count(loaded.processor.sep_id) == 2 and alone.count(loaded.processor.sep_id) == 1


def test_unknown_labels_are_an_error_or_a_counted_skip(classifier, tmp_path, capsys, caplog):
    path = tmp_path / "more.csv"
    path.write_text("text,label\nbright,good\ndull,unheard\ndull,bad\n")
    line = fails(capsys, "evaluate", "--checkpoint", str(classifier), "--data", str(path))
    assert "more.csv, line 3: the label 'unheard'" in line
    capsys.readouterr()
    assert run_command(["evaluate", "--checkpoint", str(classifier), "--data", str(path), "--skip-bad"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 2
    columns = tmp_path / "columns.tsv"
    columns.write_text("good\tbright\nbad\tdull\n")
    arguments = ["--data", str(columns), "--columns", "text=1", "label=0"]
    assert run_command(["evaluate", "--checkpoint", str(classifier), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 2


def test_settings_of_a_task_survive_conversion(classifier, tmp_path, capsys):
    assert run_command(["convert", "--checkpoint", str(classifier), "--output", str(tmp_path / "hf")]) == 0
    assert load(tmp_path / "hf").task == load(classifier).task
    assert load(tmp_path / "hf").labels == ("bad", "good")
    assert load(tmp_path / "hf", settings={"length": 8}).task.length == 8
    with pytest.raises(ValueError, match="TextClassification has no setting size; there are problem, length"):
        load(tmp_path / "hf", settings={"size": 8})
    line = fails(capsys, "generate", "--checkpoint", str(tmp_path / "hf"), "--prompt", "a")
    assert "holds a SequenceClassifier, which does not write text" in line


def test_a_model_without_a_head_has_no_metrics(reviews, tmp_path, capsys):
    tokenizer = Tokenizer.train_wordpiece(["bright", "dull"], vocab_size=40)
    config = BertConfig(vocab_size=tokenizer.vocab_size, max_length=8, dim=16, depth=1, heads=2)
    save_pretrained(config.build(rngs=nnx.Rngs(0)), tmp_path / "bare", processor=tokenizer)
    line = fails(capsys, "evaluate", "--checkpoint", str(tmp_path / "bare"), "--data", str(reviews))
    assert "holds a model without a head, which can only predict" in line
    (tmp_path / "in.txt").write_text("bright\n")
    assert len(predict(capsys, tmp_path / "bare", "--input", str(tmp_path / "in.txt"))[0]["embedding"]) == 16


def test_a_task_without_a_report_says_so_before_the_work(classifier, tmp_path, capsys):
    line = fails(capsys, "evaluate", "--checkpoint", str(classifier), "--report", str(tmp_path / "report"))
    assert line == "error: TextClassification writes no report" and not (tmp_path / "report").exists()


def test_several_seeds_are_averaged(reviews, tmp_path, capsys):
    arguments = ["--config", "bert_classify", "--workdir", str(tmp_path), "--data.source", str(reviews), *TINY]
    assert run_command(["train", *arguments, "--training.steps", "2", "--seeds", "0", "3"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    values = summary["eval/loss"]["values"]
    assert summary["seeds"] == [0, 3] and values[0] != values[1]
    assert summary["eval/loss"]["mean"] == pytest.approx(sum(values) / 2)
    assert summary["eval/loss"]["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert summary == json.loads((tmp_path / "seeds.json").read_text())
