"""A run from its first step to its last: what it writes, how it ends, and that stopping it changes nothing."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import transformers_jax
import transformers_jax.running
from transformers_jax.data import TextData
from transformers_jax.experiment import Experiment, load_config
from transformers_jax.loading import evaluate, load
from transformers_jax.models import GPTConfig
from transformers_jax.running import run
from transformers_jax.tasks import LanguageModeling
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.loop import TrainingConfig, TrainingDivergedError
from transformers_jax.training.mesh import MeshConfig
from transformers_jax.training.optimizer import OptimizerConfig
from transformers_jax.training.settings import from_data, to_data

ROOT = Path(__file__).parents[1]
TEXT = "".join(f"{i} times {i + 1} is {i * (i + 1)}.\n" for i in range(400))


@pytest.fixture
def experiment(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return Experiment(
        task=LanguageModeling(length=24, sample_tokens=8),
        model=GPTConfig(vocab_size=None, max_length=32, dim=16, depth=2, heads=2, dropout=0.1),
        data=TextData(source=str(tmp_path / "text.txt"), tokenizer="character", cache_dir=str(tmp_path / "cache")),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, weight_decay=0.1),
        training=TrainingConfig(steps=20, batch_size=8, accumulation=2, log_every=1, eval_every=10, checkpoint_every=5),
        mesh=MeshConfig(devices=1),
    )


def change(experiment, **fields):
    """`change(experiment, training=dict(steps=7))`, one level deep."""
    parts = {
        name: dataclasses.replace(getattr(experiment, name), **value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return dataclasses.replace(experiment, **parts)


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir):
    return {line["step"]: line["loss"] for line in metrics(workdir) if "loss" in line}


def evaluations(workdir):
    return [(line["step"], line["eval/loss"]) for line in metrics(workdir) if "eval/loss" in line]


def assert_same_parameters(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def seen_batches(monkeypatch):
    """The rows of every batch that a run trains on."""
    seen = []
    original = transformers_jax.running.put_batch

    def put_batch(batch, sharding):
        seen.append(batch["input_ids"].copy())
        return original(batch, sharding)

    monkeypatch.setattr(transformers_jax.running, "put_batch", put_batch)
    return seen


def interrupt_at(monkeypatch, step):
    """SIGTERM arrives when the metrics of `step` are logged."""
    original = MetricsLogger.log

    def log(self, number, values):
        original(self, number, values)
        if number == step and "loss" in values:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(MetricsLogger, "log", log)
    return lambda: monkeypatch.setattr(MetricsLogger, "log", original)


@pytest.mark.slow
@pytest.mark.parametrize("ema", [None, 0.9])
def test_stopping_and_continuing_equals_never_stopping(experiment, tmp_path, monkeypatch, seen_batches, ema):
    # No evaluation, whose batches would be among those seen.
    experiment = change(experiment, training=dict(eval_every=0, prefetch=1, ema=ema))
    straight = run(experiment, tmp_path / "straight")
    straight_batches = seen_batches.copy()

    seen_batches.clear()
    restore = interrupt_at(monkeypatch, 7)
    first = run(experiment, tmp_path / "stopped")
    restore()
    stopped_at = int(first.state.step)
    assert first.ended == "interrupted" and 7 <= stopped_at <= 10 and first.sample is None
    first_batches = seen_batches[:stopped_at]
    seen_batches.clear()
    second = run(experiment, tmp_path / "stopped")
    assert second.ended == "finished"

    steps = [*first_batches, *seen_batches]
    for n in range(20):
        np.testing.assert_array_equal(steps[n], straight_batches[n])
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")
    assert evaluations(tmp_path / "stopped") == evaluations(tmp_path / "straight")
    assert_same_parameters(second.state, straight.state)


CHILD = """
import json, sys, jax
from transformers_jax.experiment import Experiment
from transformers_jax.running import run
from transformers_jax.training.settings import from_data
jax.config.update("jax_compilation_cache_dir", sys.argv[3])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
run(from_data(json.loads(sys.argv[1]), Experiment), sys.argv[2])
"""


def start(experiment, workdir, tmp_path):
    """The run as a process of its own."""
    arguments = [json.dumps(to_data(experiment)), str(workdir), str(tmp_path / "compiled")]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(workdir, step, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the run ended with {process.returncode}: {process.stderr.read()}")
        path = workdir / "metrics.jsonl"
        if path.exists() and path.read_bytes().count(b'"loss"') >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} in two minutes")


@pytest.mark.slow
def test_kill_9_at_any_moment_and_continuing_equals_never_stopping(experiment, tmp_path):
    experiment = change(
        experiment, training=dict(steps=120, checkpoint_every=3, eval_every=40), task=dict(sample_tokens=0)
    )
    straight = run(experiment, tmp_path / "straight")
    workdir = tmp_path / "killed"
    for step in (4, 40):
        process = start(experiment, workdir, tmp_path)
        wait_for(workdir, step, process)
        process.kill()
        process.wait()
    assert max(losses(workdir)) < 120
    resumed = run(experiment, workdir)
    assert losses(workdir) == losses(tmp_path / "straight")
    assert evaluations(workdir) == evaluations(tmp_path / "straight")
    assert_same_parameters(resumed.state, straight.state)


@pytest.mark.slow
def test_sigterm_saves_and_exits_0(experiment, tmp_path):
    experiment = change(experiment, training=dict(steps=100_000, checkpoint_every=0, eval_every=0))
    process = start(experiment, tmp_path / "run", tmp_path)
    wait_for(tmp_path / "run", 5, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    saved = load(tmp_path / "run", which="latest")
    assert saved.step == max(losses(tmp_path / "run")) >= 5


def test_the_newest_checkpoint_is_passed_over_when_it_is_damaged(experiment, tmp_path, caplog):
    straight = run(experiment, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "20"
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    again = run(experiment, tmp_path / "run")
    assert "20 is passed over" in caplog.text
    assert_same_parameters(again.state, straight.state)
    assert sorted(losses(tmp_path / "run")) == list(range(1, 21))


def test_another_model_data_optimizer_or_seed_is_refused_with_the_difference(experiment, tmp_path):
    first = change(experiment, training=dict(steps=2))
    run(first, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "other.txt").write_text(TEXT + "More.\n")
    others = {
        r"model.depth 2 -> 3": change(first, model=dict(depth=3)),
        r"model.attention_dropout 0.1 -> 0.5": change(first, model=dict(attention_dropout=0.5)),
        r"seed 0 -> 1": change(first, seed=1),
        r"optimizer.learning_rate 0.01 -> 0.02": change(first, optimizer=dict(learning_rate=0.02)),
        r"training.batch_size 8 -> 4": change(first, training=dict(batch_size=4)),
        r"the examples, their tokens or their held-out part": change(
            first, data=dict(source=str(tmp_path / "other.txt"))
        ),
        r"the tokenizer or image processor is not the one": change(first, data=dict(tokenizer="byte")),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            run(other, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert load(tmp_path / "run").step == 2


def test_the_average_of_the_weights_is_what_is_evaluated_kept_and_used(experiment, tmp_path):
    plain = run(change(experiment, training=dict(steps=10)), tmp_path / "plain")
    averaged = change(experiment, training=dict(steps=10, ema=0.9))
    result = run(averaged, tmp_path / "run")
    assert_same_parameters(result.state.model, plain.state.model)  # training itself does not change
    assert result.evaluation["eval/loss"] != plain.evaluation["eval/loss"]
    loaded = load(tmp_path / "run")
    assert_same_parameters(loaded.model, result.state.ema)
    assert evaluate(loaded)["loss"] == pytest.approx(result.evaluation["eval/loss"], rel=1e-6)
    assert result.sample == averaged.task.sample(loaded.model, loaded.processor)
    assert_same_parameters(load(tmp_path / "plain").model, plain.state.model)
    with pytest.raises(ValueError, match=r"other settings: training.ema 0.9 -> None"):
        run(change(averaged, training=dict(ema=None)), tmp_path / "run")
    with pytest.raises(ValueError, match=r"other settings: training.ema None -> 0.9"):
        run(averaged, tmp_path / "plain")


def test_a_run_without_its_description_is_still_compared(experiment, tmp_path):
    first = change(experiment, training=dict(steps=2))
    run(first, tmp_path / "run")
    (tmp_path / "run" / "experiment.json").unlink()
    with pytest.raises(ValueError, match="seed 0 -> 1"):
        run(change(first, seed=1), tmp_path / "run")


def test_checkpoints_of_which_none_can_be_used_are_not_deleted(experiment, tmp_path):
    first = change(experiment, training=dict(steps=2))
    run(first, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for manifest in checkpoints.glob("*/manifest.json"):
        manifest.unlink()
    before = sorted(checkpoints.rglob("*"))
    with pytest.raises(ValueError, match="holds 2, but nothing that can be used"):
        run(first, tmp_path / "run")
    assert sorted(checkpoints.rglob("*")) == before and losses(tmp_path / "run")


@pytest.mark.slow
def test_two_runs_do_not_share_a_working_directory(experiment, tmp_path):
    long = change(experiment, training=dict(steps=100_000, checkpoint_every=0, eval_every=0))
    process = start(long, tmp_path / "run", tmp_path)
    wait_for(tmp_path / "run", 2, process)
    with pytest.raises(ValueError, match="another process is training in"):
        run(long, tmp_path / "run")
    process.kill()
    process.wait()


def test_evaluation_notices_that_the_text_has_changed(experiment, tmp_path):
    run(change(experiment, training=dict(steps=2)), tmp_path / "run")
    (tmp_path / "text.txt").write_text("0 times 0 is 0.\n" + TEXT)
    with pytest.raises(ValueError, match="name the data to evaluate on"):
        evaluate(load(tmp_path / "run"))


@pytest.mark.slow
def test_steps_mesh_and_intervals_may_change_and_are_printed(experiment, tmp_path, capsys):
    first = change(experiment, training=dict(steps=10), optimizer=dict(schedule="constant"))
    run(first, tmp_path / "run")
    more = change(first, training=dict(steps=14, log_every=2, accumulation=1), mesh=MeshConfig(data=4, fsdp=2))
    result = run(more, tmp_path / "run")
    printed = capsys.readouterr().out
    assert int(result.state.step) == 14
    for line in ("training.steps 10 -> 14", "mesh.data -1 -> 4", "mesh.devices 1 -> None", "training.log_every 1 -> 2"):
        assert f"changed since the run began: {line}" in printed


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_continues_on_any_other(experiment, tmp_path):
    experiment = change(experiment, training=dict(accumulation=1), optimizer=dict(schedule="constant"))
    straight = change(experiment, training=dict(steps=16))
    run(straight, tmp_path / "straight")
    for steps, mesh in (
        (6, MeshConfig(data=8)),
        (11, MeshConfig(devices=1)),
        (16, MeshConfig(data=2, fsdp=2, tensor=2)),
    ):
        run(change(experiment, training=dict(steps=steps), mesh=mesh), tmp_path / "moved")
    expected, moved = losses(tmp_path / "straight"), losses(tmp_path / "moved")
    np.testing.assert_allclose(list(moved.values()), list(expected.values()), atol=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(experiment, tmp_path):
    wild = change(experiment, optimizer=dict(learning_rate=1e25, warmup_steps=0, clip_norm=None, name="sgd"))
    with pytest.raises(TrainingDivergedError, match=r"the loss of step [2-4] is (nan|inf)"):
        run(wild, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not checkpoints.exists() or not list(checkpoints.iterdir())


def test_training_stops_early_and_keeps_the_best_checkpoint(experiment, tmp_path):
    # A learning rate that only makes things worse, once the warm-up has brought it up.
    worse = change(
        experiment,
        optimizer=dict(learning_rate=0.5, warmup_steps=20, schedule="constant"),
        training=dict(steps=60, eval_every=2, checkpoint_every=0, patience=3),
    )
    result = run(worse, tmp_path / "run")
    assert result.ended == "stopped early"
    scores = evaluations(tmp_path / "run")
    best_step, best = min(scores, key=lambda score: score[1])
    assert scores[-1][0] == best_step + 6
    assert load(tmp_path / "run", which="best").step == best_step
    assert load(tmp_path / "run", which="latest").step == scores[-1][0]
    assert evaluate(load(tmp_path / "run", which="best"))["loss"] == pytest.approx(best, rel=1e-6)
    again = run(worse, tmp_path / "run")
    assert again.ended == "stopped early" and evaluations(tmp_path / "run") == scores


def test_training_and_evaluation_steps_are_compiled_once(experiment, tmp_path, monkeypatch):
    traces = {"train": 0, "evaluate": 0}
    original = transformers_jax.running.make_train_step

    def make_train_step(*args, **kwargs):
        step = original(*args, **kwargs)

        def counted(state, batch):
            traces["train"] += 1
            return step(state, batch)

        return counted

    class Counted(LanguageModeling):
        def evaluate(self, model, batch):
            traces["evaluate"] += 1
            return super().evaluate(model, batch)

    monkeypatch.setattr(transformers_jax.running, "make_train_step", make_train_step)
    task = Counted(
        **{field.name: getattr(experiment.task, field.name) for field in dataclasses.fields(experiment.task)}
    )
    run(change(experiment, task=task), tmp_path / "run")
    assert traces == {"train": 1, "evaluate": 1}


def test_every_held_out_token_counts_once(experiment, tmp_path):
    run(change(experiment, training=dict(steps=2, batch_size=8), data=dict(tokenizer="byte")), tmp_path / "run")
    held_out = len(TEXT) - int(len(TEXT) * 0.9)
    loaded = load(tmp_path / "run")
    for batch_size in (1, 3, 8, 500):
        found = evaluate(loaded, batch_size=batch_size)
        assert found["tokens"] == held_out - 1
        assert found["loss"] == pytest.approx(evaluate(loaded)["loss"], rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))  # a token is a byte


def test_a_run_that_is_done_is_not_trained_again(experiment, tmp_path):
    first = run(experiment, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    again = run(experiment, tmp_path / "run")
    assert again.ended == "finished" and again.sample == first.sample
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert_same_parameters(again.state, first.state)


@pytest.mark.slow
def test_training_starts_from_another_run_and_from_a_hugging_face_checkpoint(experiment, tmp_path):
    run(change(experiment, data=dict(tokenizer="bpe", vocab_size=280)), tmp_path / "first")
    first = load(tmp_path / "first")
    transformers_jax.save_pretrained(first.model, tmp_path / "hf", processor=first.processor)
    known = evaluate(first)["loss"]
    # The sizes and the tokenizer are the checkpoint's, whatever the config says; dropout is the config's.
    second = change(
        experiment, training=dict(steps=1), optimizer=dict(learning_rate=0.0), model=dict(dropout=0.3, dim=8)
    )
    for source in ("first", "hf"):
        result = run(change(second, initial_checkpoint=str(tmp_path / source)), tmp_path / f"second_{source}")
        assert result.evaluation["eval/loss"] == pytest.approx(known, rel=1e-5)
        config = load(tmp_path / f"second_{source}").model.config
        assert (config.dim, config.dropout, config.vocab_size) == (16, 0.3, first.processor.vocab_size)
        assert_same_parameters(result.state.model, first.model)


def test_a_tokenizer_larger_than_the_model_is_an_error(experiment, tmp_path):
    with pytest.raises(ValueError, match=r"the tokenizer has 257 tokens but model\.vocab_size is 100"):
        run(change(experiment, data=dict(tokenizer="byte"), model=dict(vocab_size=100)), tmp_path / "run")


def test_text_shorter_than_a_block_is_an_error_before_training(experiment, tmp_path):
    (tmp_path / "short.txt").write_text("abcdefghij" * 2)
    with pytest.raises(ValueError, match="18 tokens, but blocks of 24 need at least 25"):
        run(change(experiment, data=dict(source=str(tmp_path / "short.txt"))), tmp_path / "run")


def test_an_experiment_survives_as_data(experiment):
    assert from_data(json.loads(json.dumps(to_data(experiment))), Experiment) == experiment
    with pytest.raises(ValueError, match="has no field surprise"):
        from_data(to_data(experiment) | {"surprise": 1}, Experiment)
    with pytest.raises(ValueError, match="is not a Experiment"):
        from_data({"class": "subprocess:Popen"}, Experiment)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_each_config_can_be_read_by_path_and_by_name(path):
    assert load_config(str(path)) == load_config(path.stem)
    assert path.read_text().startswith('"""')


def test_the_package_imports_neither_torch_nor_tensorflow():
    code = (
        "import sys, transformers_jax.cli, transformers_jax.pretrained, transformers_jax.generation;"
        "print([name for name in ('torch', 'tensorflow', 'transformers') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert output.stdout.strip() == "[]", output.stderr
