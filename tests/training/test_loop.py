"""The loop itself: what it counts as waiting, and that its step may be any function."""

import json
import time

import jax
import jax.numpy as jnp
import pytest

from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.loop import TrainingConfig, train
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


@pytest.mark.parametrize("fields", [{"steps": 0}, {"log_every": 0}, {"eval_every": -1}, {"patience": 0}])
def test_settings_that_make_no_sense_are_errors_with_name_and_value(fields):
    ((name, value),) = fields.items()
    with pytest.raises(ValueError, match=f"training.{name}={value} must"):
        TrainingConfig(**fields)
