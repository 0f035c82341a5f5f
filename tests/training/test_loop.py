"""The loop itself: what counts as waiting, what decides which state is best, and that its step may be any function."""

import dataclasses
import json
import math
import time

import jax
import jax.numpy as jnp
import pytest

from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.loop import Progress, TrainingConfig, train
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
