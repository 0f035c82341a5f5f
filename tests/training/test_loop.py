"""The loop itself: what counts as waiting, what decides which state is best, and that its step may be any function."""

import dataclasses
import gzip
import itertools
import json
import math
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from transformers_jax.training import loop
from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.loop import Progress, StepWork, TrainingConfig, train
from transformers_jax.training.state import TrainState


def run(tmp_path, *, batch_seconds, step_size):
    """The log lines of a loop whose batches take `batch_seconds` and whose steps grow with `step_size`."""

    def batches():
        while True:
            time.sleep(batch_seconds)
            yield jnp.ones((step_size, step_size))

    @jax.jit
    def step(state, batch):
        for _ in range(8):
            batch = jnp.tanh(batch @ batch)
        return state.replace(step=state.step + 1), {"loss": jnp.mean(batch)}

    with (
        Checkpointer(tmp_path / "checkpoints") as checkpointer,
        MetricsLogger(tmp_path, total_steps=12, console="none") as logger,
    ):
        train(
            TrainState(jnp.zeros((), jnp.int32), {"w": jnp.zeros(2)}, ()),
            step,
            batches(),
            config=TrainingConfig(steps=12, log_every=6, eval_every=0, checkpoint_every=0),
            checkpointer=checkpointer,
            logger=logger,
        )
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_waiting_is_the_time_in_which_the_device_has_nothing_to_do(tmp_path):
    # The first lines hold the compilation.
    assert run(tmp_path / "slow_data", batch_seconds=0.05, step_size=4)[-1]["data_wait"] > 0.5
    assert run(tmp_path / "slow_steps", batch_seconds=0.001, step_size=700)[-1]["data_wait"] < 0.1


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 0},
        {"log_every": 0},
        {"eval_every": -1},
        {"patience": 0},
        {"epochs": 0.0},
        {"epochs": -1.0},
        {"ema": 0.0},
        {"ema": 1.0},
        {"peak_flops": 0.0},
        {"peak_flops": math.inf},
    ],
)
def test_settings_that_make_no_sense_are_errors_with_name_and_value(fields):
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=f"training.{name}={value} must"):
        TrainingConfig(**fields)


# --- epochs


@pytest.mark.parametrize(
    ("epochs", "examples", "batch_size", "steps", "every"),
    [
        (3, 100, 10, 30, 10),
        (3, 67_349, 32, 6314, 2105),  # 6313.97 batches
        (1, 7, 8, 1, 1),
        (0.5, 100, 10, 5, 10),
        (1.1, 100, 10, 11, 10),  # 1.1 * 100 is 110.00000000000001
        (0.001, 100, 10, 1, 10),
    ],
)
def test_epochs_are_as_many_steps_as_show_each_example_that_often(epochs, examples, batch_size, steps, every):
    config = TrainingConfig(epochs=epochs, batch_size=batch_size, patience=2).resolved(examples)
    assert config == TrainingConfig(
        steps=steps, batch_size=batch_size, eval_every=every, checkpoint_every=every, patience=2
    )
    assert config.resolved(examples) == config.resolved() == config


def test_intervals_that_are_set_stay_and_others_are_200_steps_without_epochs():
    config = TrainingConfig(epochs=2, eval_every=7, checkpoint_every=0).resolved(320)
    assert (config.steps, config.eval_every, config.checkpoint_every) == (20, 7, 0)
    config = TrainingConfig(steps=50).resolved(320)
    assert (config.steps, config.eval_every, config.checkpoint_every) == (50, 200, 200)


def test_epochs_need_a_number_of_examples(tmp_path):
    with pytest.raises(ValueError, match=r"training\.epochs=2 needs a known number of examples; set training\.steps"):
        evaluated(tmp_path, [], TrainingConfig(epochs=2))


# --- what decides


def evaluated(tmp_path, results, config, *, start=0, metric="f1", maximize=True, progress=None):
    """A loop whose n-th evaluation gives `results[n]`: its end, and the checkpoints there are after it."""
    results = iter(results)

    def step(state, batch):
        return state.replace(step=state.step + 1), {"loss": jnp.zeros(())}

    with (
        Checkpointer(
            tmp_path, best_metric=f"eval/{metric}", best_mode="max" if maximize else "min", keep_latest=1
        ) as checkpointer,
        MetricsLogger(tmp_path / "logs", total_steps=config.steps, console="none") as logger,
    ):
        result = train(
            TrainState(jnp.full((), start, jnp.int32), {"w": jnp.zeros(2)}, ()),
            step,
            iter(lambda: 0, 1),
            config=config,
            start_step=start,
            evaluate=lambda model: next(results),
            metric=metric,
            maximize=maximize,
            progress=progress,
            checkpointer=checkpointer,
            logger=logger,
        )
        return result, checkpointer.steps(), checkpointer.best_step(), checkpointer.read_meta()[1]["progress"]


def f1(*values):
    # A loss that says the opposite, so that it would show if it were what decides.
    return [{"loss": 1 + (0 if math.isnan(value) else value), "f1": value} for value in values]


def test_the_metric_decides_which_checkpoint_is_best(tmp_path):
    config = TrainingConfig(steps=10, eval_every=2, checkpoint_every=0)
    result, kept, best, _ = evaluated(tmp_path / "max", f1(0.2, 0.7, 0.5, 0.7, 0.6), config)
    assert (result.ended, kept, best) == ("finished", [4, 10], 4)
    assert result.evaluation == {"eval/loss": 1.6, "eval/f1": 0.6}
    result, kept, best, _ = evaluated(tmp_path / "min", f1(0.7, 0.2, 0.5, 0.7, 0.6), config, maximize=False)
    assert (result.ended, kept, best) == ("finished", [4, 10], 4)


def test_patience_counts_evaluations_without_a_better_metric(tmp_path):
    config = TrainingConfig(steps=20, eval_every=2, checkpoint_every=0, patience=3)
    result, kept, best, progress = evaluated(tmp_path, f1(0.2, 0.1, 0.7, 0.5, 0.7, 0.6), config)
    assert (result.ended, int(result.state.step), kept, best) == ("stopped early", 12, [6, 12], 6)
    assert progress == {"best": 0.7, "evaluations_without_gain": 3, "metric": "f1"}


@pytest.mark.parametrize("maximize", [True, False])
def test_a_metric_that_is_not_a_number_is_never_better(tmp_path, maximize):
    config = TrainingConfig(steps=8, eval_every=2, checkpoint_every=0, patience=3)
    values = (math.nan, 0.5, math.nan, math.nan)
    result, kept, best, progress = evaluated(tmp_path, f1(*values), config, maximize=maximize)
    assert (result.ended, kept, best, progress["best"]) == ("finished", [4, 8], 4, 0.5)
    config = dataclasses.replace(config, steps=20)
    result, *_, progress = evaluated(tmp_path / "none", f1(*[math.nan] * 9), config, maximize=maximize)
    assert (result.ended, int(result.state.step), progress["best"]) == ("stopped early", 6, None)


def test_a_metric_that_the_evaluation_does_not_give_is_an_error_that_loses_no_step(tmp_path):
    config = TrainingConfig(steps=20, eval_every=4, checkpoint_every=0)
    with pytest.raises(ValueError, match=r"gives no 'F1' to decide by; training\.metric may be loss, f1"):
        evaluated(tmp_path, f1(0.5), config, metric="F1")
    result, kept, *_ = evaluated(tmp_path, f1(0.6, 0.7, 0.8, 0.9), config, start=4)
    assert result.ended == "finished" and kept == [20]


def test_another_metric_begins_a_new_count_and_old_checkpoints_counted_the_loss(tmp_path):
    config = TrainingConfig(steps=12, eval_every=2, checkpoint_every=0, patience=2)
    kept = Progress(**{"best": 0.1, "evaluations_without_gain": 1})  # as older checkpoints have it
    result, *_, progress = evaluated(tmp_path / "other", f1(0.2, 0.1, 0.1), config, start=4, progress=kept)
    assert (result.ended, int(result.state.step), progress["best"]) == ("stopped early", 10, 0.2)
    result, *_, progress = evaluated(
        tmp_path / "same", f1(0.2), config, start=4, progress=kept, metric="loss", maximize=False
    )
    assert (result.ended, int(result.state.step), progress["best"]) == ("stopped early", 6, 0.1)


# --- rates


class Clock(SimpleNamespace):
    """Takes the place of `time` in the loop: it stands still unless something advances it."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    return clock


def timed(tmp_path, clock, *, waits, step_seconds=0.5, config, work=StepWork(), start=0):
    """The log lines of a loop in which the batch of step n takes `waits(n)` seconds and each step `step_seconds`."""

    def batches():
        for number in range(start + 1, config.steps + 1):
            clock.now += waits(number)
            yield number

    def step(state, batch):
        clock.now += step_seconds
        return state.replace(step=state.step + 1), {"loss": jnp.zeros(())}

    def evaluate(model):
        clock.now += 1000
        return {"loss": 0.0}

    with (
        Checkpointer(tmp_path / "checkpoints") as checkpointer,
        MetricsLogger(tmp_path, total_steps=config.steps, console="lines") as logger,
    ):
        state = TrainState(jnp.full((), start, jnp.int32), {"w": jnp.zeros(2)}, ())
        train(
            state,
            step,
            batches(),
            config=config,
            start_step=start,
            evaluate=evaluate,
            checkpointer=checkpointer,
            logger=logger,
            work=work,
        )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_rates_are_items_and_flops_by_the_time_of_a_step_alone(tmp_path, clock):
    config = TrainingConfig(steps=40, log_every=10, eval_every=5, checkpoint_every=5)
    work = StepWork(items=64, item="examples", flops=8e11, devices=4, peak_flops=1e12)
    for line in timed(tmp_path, clock, waits=lambda number: 0.0, config=config, work=work):
        assert line["steps_per_second"] == pytest.approx(2)
        assert line["examples_per_second"] == pytest.approx(128)
        assert line["examples_per_second_per_device"] == pytest.approx(32)
        assert line["mfu"] == pytest.approx(0.4)  # 8e11 FLOPs / 0.5 s / (4 x 1e12 FLOP/s)


def test_without_a_known_peak_no_utilisation_is_invented(tmp_path, clock):
    config = TrainingConfig(steps=10, log_every=10)
    lines = timed(tmp_path, clock, waits=lambda number: 0.0, config=config, work=StepWork(items=2, flops=1e9))
    assert "mfu" not in lines[-1] and lines[-1]["tokens_per_second_per_device"] == pytest.approx(4)


# --- devices that wait for data


def hunger(out):
    return [line for line in out.splitlines() if "wait for data" in line]


def test_starving_devices_are_named_once_with_what_to_set(tmp_path, clock, capsys):
    config = TrainingConfig(steps=100, log_every=10, data_workers=3)
    timed(tmp_path, clock, waits=lambda number: 0.5, config=config)
    (line,) = hunger(capsys.readouterr().out)
    assert "the devices wait for data 50% of the time" in line
    for setting in ("training.data_workers (now 3)", "training.data_processes (now 0)", "training.prefetch (now 8)"):
        assert setting in line


@pytest.mark.parametrize(
    ("why", "waits", "step_seconds", "steps"),
    [
        ("the first interval compiles and fills the pipeline", lambda number: 50 * (number <= 10), 0.5, 100),
        ("a slow interval now and then, such as at the start of an epoch", lambda n: (n // 10) % 3 == 1, 0.5, 200),
        ("a tenth is not much", lambda number: 0.04, 0.5, 100),
        ("a run of a few seconds", lambda number: 0.05, 0.05, 100),
        ("a run of three intervals", lambda number: 0.5, 0.5, 30),
    ],
)
def test_other_waiting_is_not_worth_a_warning(tmp_path, clock, capsys, why, waits, step_seconds, steps):
    config = TrainingConfig(steps=steps, log_every=10)
    timed(tmp_path, clock, waits=waits, step_seconds=step_seconds, config=config)
    assert hunger(capsys.readouterr().out) == [], why


# --- the profiler


def traced_steps(workdir):
    """The steps of each trace below a working directory."""
    traces = []
    for path in sorted((workdir / "profile").glob("plugins/profile/*/*.trace.json.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert path.with_name(path.name.replace(".trace.json.gz", ".xplane.pb")).exists()  # what XProf reads
        traces.append(sorted(int(event["args"]["step_num"]) for event in events if event.get("name") == "train"))
    return traces


def test_the_trace_holds_the_steps_that_were_asked_for(tmp_path, clock, capsys):
    config = TrainingConfig(steps=8, log_every=2, profile_steps=(4, 6))
    timed(tmp_path, clock, waits=lambda number: 0.0, config=config)
    assert traced_steps(tmp_path) == [[4, 5, 6]]
    assert (
        f"steps 4 to 6 are traced in {tmp_path / 'profile'}; to see them: pip install xprof" in capsys.readouterr().out
    )


def test_the_devices_are_done_with_earlier_steps_and_with_the_last_one(tmp_path, monkeypatch):
    """A step that takes a while on the device, which `step` does not wait for."""
    seen = []

    @jax.jit
    def long_step(state, batch):
        for _ in range(30):
            batch = jnp.tanh(batch @ batch)
        return state.replace(step=state.step + 1), {"loss": jnp.mean(batch)}

    latest = {}

    def step(state, batch):
        latest["state"], metrics = long_step(state, batch)
        return latest["state"], metrics

    def record(*where):
        seen.append((int(latest["state"].step) if latest["state"].step.is_ready() else None, *where))

    monkeypatch.setattr(jax.profiler, "start_trace", record)
    monkeypatch.setattr(jax.profiler, "stop_trace", record)
    with (
        Checkpointer(tmp_path / "checkpoints") as checkpointer,
        MetricsLogger(tmp_path, total_steps=6, console="none") as logger,
    ):
        train(
            TrainState(jnp.zeros((), jnp.int32), {"w": jnp.zeros(2)}, ()),
            step,
            itertools.repeat(jnp.ones((300, 300))),
            config=TrainingConfig(steps=6, profile_steps=(3, 5)),
            checkpointer=checkpointer,
            logger=logger,
        )
    assert seen == [(2, tmp_path / "profile"), (5,)]


def test_a_start_behind_the_range_traces_nothing_and_one_inside_it_says_so(tmp_path, clock, capsys):
    config = TrainingConfig(steps=8, profile_steps=(4, 6))
    timed(tmp_path / "behind", clock, waits=lambda number: 0.0, config=config, start=6)
    assert not (tmp_path / "behind/profile").exists() and "trace" not in capsys.readouterr().out
    timed(tmp_path / "inside", clock, waits=lambda number: 0.0, config=config, start=4)
    assert not (tmp_path / "inside/profile").exists()
    assert "no trace of steps 4 to 6: step 5 is the first of this start" in capsys.readouterr().out


def test_a_loop_that_ends_inside_the_range_leaves_the_trace_so_far(tmp_path, clock):
    def waits(number):
        if number == 5:
            raise OSError("the disk is gone")
        return 0.0

    with pytest.raises(OSError, match="the disk is gone"):
        timed(tmp_path, clock, waits=waits, config=TrainingConfig(steps=8, profile_steps=(3, 7)))
    ((*steps,),) = traced_steps(tmp_path)
    assert steps[:2] == [3, 4]
    jax.profiler.start_trace(tmp_path / "another")  # none is left open
    jax.profiler.stop_trace()


@pytest.mark.parametrize("steps", [(1, 3), (0, 0), (-2, 3), (5, 4), (8, 11)])
def test_a_range_of_no_such_steps_is_an_error(steps):
    with pytest.raises(ValueError, match=r"training\.profile_steps=.* must be a first and a last step from 2 on"):
        TrainingConfig(steps=10, profile_steps=steps)


def test_the_range_of_a_run_in_epochs_is_checked_once_its_steps_are_known():
    config = TrainingConfig(epochs=2, batch_size=10, profile_steps=(15, 21))
    assert config.resolved(110).profile_steps == (15, 21)
    with pytest.raises(ValueError, match=r"profile_steps=\(15, 21\).* to 20, the last one"):
        config.resolved(100)
