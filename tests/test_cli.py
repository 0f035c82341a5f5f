"""The commands as a person meets them: what they print, and that a mistake is one line and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from transformers_jax.cli import _main as run_command
from transformers_jax.data import Tokenizer
from transformers_jax.experiment import load

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
    *("--data.tokenizer", "character", "--task.sample-tokens", "10", "--mesh.data", "1"),
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
