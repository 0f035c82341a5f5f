"""The training loop: batches in, checkpoints and log lines out, and an end that loses nothing."""

import contextlib
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import jax

from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.distributed import peers
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.profiling import StepProfiler
from transformers_jax.training.state import TrainState

DEFAULT_INTERVAL = 200
"""Steps between evaluations, and between checkpoints, where neither they nor epochs are set."""

STARVING_SHARE, STARVING_LAPS, STARVING_SECONDS = 0.1, 3, 10.0
"""Devices starve if they wait for data more than this share of the time in this many log lines in a row, which took
this long together."""


class TrainingDivergedError(FloatingPointError):
    """The loss became NaN or infinite."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how a model is trained. One step is one optimizer update."""

    steps: int = 1000
    """Optimizer updates in all."""
    epochs: float | None = None
    """Passes over the training examples; replaces steps."""
    batch_size: int = 32
    """Examples per update, over all devices and processes."""
    batch_tokens: int | None = None
    """Instead, the most tokens per update, padding included: as many examples of about one length as they hold, in
    multiples of batch_size. None: batch_size examples."""
    eval_batch_size: int | None = None
    """Examples at a time in evaluations. None: batch_size."""
    accumulation: int = 1
    """Micro-batches an update is computed in, one after another, to save memory. Does not change the result."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl."""
    eval_every: int | None = None
    """Steps between evaluations on held-out data; the last step is always evaluated. 0: only the last. None: once an
    epoch where epochs are given, else 200."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; the last step is always saved, and the best. 0: only these, and when interrupted.
    None: once an epoch where epochs are given, else 200."""
    ema: float | None = None
    """Decay of a moving average of the weights, such as 0.9999, which is what is evaluated, kept and used. None: the
    weights themselves."""
    metric: str | None = None
    """What decides which checkpoint is the best, and early stopping. None: the task's own metric."""
    patience: int | None = None
    """Stop after this many evaluations in a row without a better metric. None: never."""
    data_workers: int = 1
    """Threads that prepare batches."""
    data_processes: int = 0
    """Worker processes that prepare batches instead, for decoding and changing images. 0: threads of this process."""
    prefetch: int = 8
    """Batches prepared ahead."""
    group_by_length: int = 16
    """Of rows of unlike length, those of this many batches are sorted by length and cut into batches anew, so that less
    is filled up. 1: batches as they are drawn, which suits a loss over tokens (entities) better."""
    profile_steps: tuple[int, int] | None = None
    """First and last step of a profiler trace, which is written to WORKDIR/profile. None: no trace."""
    peak_flops: float | None = None
    """FLOP/s that one device can do at most in the type computed in, to log the model's FLOPs utilisation (MFU) by.
    None: the data sheet's number, where the device is known."""

    def __post_init__(self):
        positive = ("steps", "batch_size", "accumulation", "log_every", "data_workers", "prefetch", "group_by_length")
        for name in (*positive, "batch_tokens", "eval_batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)} must be at least 1")
        for name in ("eval_every", "checkpoint_every", "data_processes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"training.{name}={getattr(self, name)} must not be negative")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"training.epochs={self.epochs} must be above 0, or None")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"training.ema={self.ema} must be between 0 and 1, or None")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"training.patience={self.patience} must be at least 1, or None")
        if self.peak_flops is not None and not 0 < self.peak_flops < math.inf:
            raise ValueError(f"training.peak_flops={self.peak_flops} must be above 0, or None")
        if self.profile_steps is not None:
            end = math.inf if self.epochs is not None else self.steps  # the steps of epochs are not known yet
            if not 2 <= self.profile_steps[0] <= self.profile_steps[1] <= end:
                raise ValueError(
                    f"training.profile_steps={self.profile_steps} must be a first and a last step from 2 on (step 1 "
                    f"compiles)" + (f" to {end}, the last one" if end < math.inf else "")
                )

    def resolved(self, examples: int | None = None, *, batches: int | None = None) -> "TrainingConfig":
        """The same in steps, for this number of training examples: ceil(epochs * examples / batch_size) of them, and
        evaluations and checkpoints every ceil(examples / batch_size), unless something else is set. `batches` is the
        number of batches an epoch where it is another (`batch_tokens`).

        Raises `ValueError` where epochs are given but the number of examples is not.
        """
        every, steps = DEFAULT_INTERVAL, self.steps
        if self.epochs is not None:
            if examples is None:
                raise ValueError(f"training.epochs={self.epochs} needs a known number of examples; set training.steps")
            each = examples / self.batch_size if batches is None else batches
            every = math.ceil(each)
            steps = math.ceil(round(self.epochs * each, 6))  # not one more for 1.1 * 10
        return replace(
            self,
            steps=max(1, steps),
            epochs=None,
            eval_every=every if self.eval_every is None else self.eval_every,
            checkpoint_every=every if self.checkpoint_every is None else self.checkpoint_every,
        )


@dataclass(frozen=True)
class StepWork:
    """What one step does, on what: the log's rates follow from it. What is None is not logged."""

    items: int | None = None
    """Tokens or examples, over all devices."""
    item: str = "tokens"
    flops: float | None = None
    """Those that the model's formulas need, forward and backward: what is computed twice to save memory counts once."""
    devices: int = 1
    peak_flops: float | None = None
    """FLOP/s that one device can do at most."""


@dataclass
class Progress:
    """What the loop itself remembers from one start to the next: it is kept in each checkpoint."""

    best: float | None = None
    evaluations_without_gain: int = 0
    metric: str = "loss"

    def add(self, value: float, *, maximize: bool) -> None:
        """Count an evaluation. A value that is not finite is never better, and never the best."""
        gain = self.best is None or (value > self.best if maximize else value < self.best)
        if gain and math.isfinite(value):
            self.best, self.evaluations_without_gain = value, 0
        else:
            self.evaluations_without_gain += 1


@dataclass(frozen=True)
class LoopResult:
    """The last state, why the loop ended, and the last evaluation."""

    state: TrainState
    ended: Literal["finished", "interrupted", "stopped early"]
    evaluation: Mapping[str, float] = field(default_factory=dict)


def train(
    state: TrainState,
    step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]],
    batches: Iterator[Any],
    *,
    config: TrainingConfig,
    start_step: int = 0,
    progress: Progress | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    metric: str = "loss",
    maximize: bool = False,
    checkpointer: Checkpointer,
    logger: MetricsLogger,
    meta: Mapping[str, Any] | None = None,
    work: StepWork = StepWork(),
) -> LoopResult:
    """Run `step(state, batch)` from `start_step` to `config.steps`; `batches` begins with the batch of `start_step`.

    `evaluate(state.averaged)` gives means by name, which are logged as "eval/<name>". The one called `metric` (larger
    is better with `maximize`) decides when the best state so far is saved and, with `config.patience`, when to stop
    early; the `checkpointer` must be told the same. A metric that is not among them is a `ValueError` with the names
    there are, at the first evaluation and after a checkpoint. `config` may have epochs only after `resolved(examples)`.

    SIGTERM and SIGINT end the loop after the step that runs, with a checkpoint; of several processes, one that gets a
    signal ends the loops of all after the same step. A loss that is not finite raises
    `TrainingDivergedError` with its step, before anything of it is saved. `meta` is kept in each checkpoint beside the
    arrays; `work` gives the rates in the log: items per second, those of each device, and `mfu`, the share of the
    devices' peak FLOP/s that the model's FLOPs make use of (Chowdhery et al. 2022, PaLM, appendix B).

    Where the devices keep waiting for data, one line says so. `config.profile_steps` are traced by JAX's profiler.
    """
    config = config.resolved()
    if progress is None or progress.metric != metric:  # values of two metrics cannot be compared
        progress = Progress(metric=metric)
    pending: deque[tuple[int, dict[str, jax.Array]]] = deque()
    clock = _Clock(work)
    profiler = StepProfiler(config.profile_steps, logger.path.parent / "profile", start_step=start_step)
    evaluation: Mapping[str, float] = {}
    saved = start_step if start_step else None
    ended: Literal["finished", "interrupted", "stopped early"] = "finished"

    def settle(leave: int = 0) -> None:
        """Read the metrics of all but the newest `leave` steps: the device works on while the host reads."""
        while len(pending) > leave:
            number, metrics = pending.popleft()
            values = {name: float(value) for name, value in metrics.items()}
            if not math.isfinite(values["loss"]):
                logger.log(number, values)
                raise TrainingDivergedError(
                    f"the loss of step {number} is {values['loss']}; the last good checkpoint is "
                    f"{'of step ' + str(saved) if saved else 'none'}. Lower optimizer.learning_rate or clip gradients"
                )
            logger.update(number)
            if number % config.log_every == 0 or number == config.steps:
                rates = clock.lap()
                with clock.paused():
                    logger.log(number, values | rates)
                    if share := clock.starved():
                        logger.print(
                            f"the devices wait for data {share:.0%} of the time; raise training.data_workers (now "
                            f"{config.data_workers}) or training.data_processes (now {config.data_processes}), and "
                            f"training.prefetch (now {config.prefetch}) where single batches are slow"
                        )

    def save(number: int, metrics: Mapping[str, float] | None = None) -> None:
        nonlocal saved
        settle()
        with clock.paused():
            checkpointer.save(number, state, dict(meta or {}) | {"progress": asdict(progress)}, metrics)
        saved = number

    def out_of_patience() -> bool:
        return config.patience is not None and progress.evaluations_without_gain >= config.patience

    if out_of_patience() and start_step < config.steps:
        logger.print(f"stopped early at step {start_step}, before this start; raise training.patience to go on")
        return LoopResult(state, "stopped early")
    if profiler.refused:
        logger.print(profiler.refused)
    with _stop_signals() as stop_requested, profiler:
        for number in range(start_step + 1, config.steps + 1):
            if profiler.begins(number):
                settle()
                with clock.paused():
                    profiler.start(state)
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                with clock.waiting(lambda: not pending or _is_ready(pending[-1][1]["loss"])):
                    batch = next(batches)
                state, metrics = step(state, batch)
            if profiler.ends(number):
                jax.block_until_ready((state, metrics))  # before the clock stops: this is the step's own time
                with clock.paused():
                    logger.print(profiler.stop())
            pending.append((number, metrics))
            settle(leave=2)
            clock.step()

            last = number == config.steps
            fresh = None
            if evaluate is not None and (last or (config.eval_every and number % config.eval_every == 0)):
                settle()
                with clock.paused():
                    evaluation = {f"eval/{name}": value for name, value in evaluate(state.averaged).items()}
                logger.log(number, evaluation)
                fresh = evaluation
                if f"eval/{metric}" not in evaluation:
                    save(number, evaluation)  # the steps so far are not lost: another metric may go on from here
                    checkpointer.wait()
                    names = ", ".join(name.removeprefix("eval/") for name in evaluation)
                    raise ValueError(f"the evaluation gives no {metric!r} to decide by; training.metric may be {names}")
                progress.add(float(evaluation[f"eval/{metric}"]), maximize=maximize)
                if out_of_patience() and not last:
                    ended = "stopped early"
            if stop_requested() and not last:
                ended = "interrupted"
            stop = last or ended != "finished"
            due = config.checkpoint_every and number % config.checkpoint_every == 0
            improved = fresh is not None and progress.evaluations_without_gain == 0
            if stop or due or improved:
                save(number, fresh)
            if stop:
                break
        settle()
        checkpointer.wait()
    if ended == "stopped early":
        logger.print(f"stopped at step {number}: no better eval/{metric} in {config.patience} evaluations")
    elif ended == "interrupted":
        logger.print(f"interrupted; step {number} is saved and the same command continues from it")
    return LoopResult(state, ended, evaluation)


def _is_ready(value: Any) -> bool:
    return value.is_ready()


class _Clock:
    """Time per step without evaluations and saves, and the share of it in which the device waited for data."""

    def __init__(self, work: StepWork):
        self.work = work
        self.steps, self.waited, self.excluded = 0, 0.0, 0.0
        self.since = time.perf_counter()
        self.rates: dict[str, float] = {}
        self.hungry: list[tuple[float, float]] = []  # (seconds, waited) of the last laps, if of each too much
        self.told = False

    def step(self) -> None:
        self.steps += 1

    @contextlib.contextmanager
    def waiting(self, is_idle: Callable[[], bool]):
        """Counts if the device has run out of steps by the end: while it is busy, nobody waits for the batch."""
        begin = time.perf_counter()
        yield
        if is_idle():
            self.waited += time.perf_counter() - begin

    @contextlib.contextmanager
    def paused(self):
        begin = time.perf_counter()
        yield
        self.excluded += time.perf_counter() - begin

    def lap(self) -> dict[str, float]:
        """The rates since the last lap, which ends here; those of the last lap if no step was made since."""
        if self.steps == 0 and self.rates:
            return self.rates
        seconds = max(time.perf_counter() - self.since - self.excluded, 1e-9)
        steps, work = self.steps / seconds, self.work
        rates = {"steps_per_second": steps, "data_wait": min(1.0, self.waited / seconds)}
        if work.items is not None:
            rates[f"{work.item}_per_second"] = work.items * steps
            rates[f"{work.item}_per_second_per_device"] = work.items * steps / work.devices
        if work.flops is not None and work.peak_flops is not None:
            rates["mfu"] = work.flops * steps / (work.devices * work.peak_flops)
        compiled = not self.rates  # in this lap, so that its times say nothing
        hungry = not compiled and rates["data_wait"] > STARVING_SHARE
        self.hungry = [*self.hungry, (seconds, self.waited)] if hungry else []
        self.steps, self.waited, self.excluded = 0, 0.0, 0.0
        self.since, self.rates = time.perf_counter(), rates
        return rates

    def starved(self) -> float | None:
        """The share of waiting, once, when the last laps are enough to tell."""
        seconds = sum(seconds for seconds, _ in self.hungry)
        if self.told or len(self.hungry) < STARVING_LAPS or seconds < STARVING_SECONDS:
            return None
        self.told = True
        return sum(waited for _, waited in self.hungry) / seconds


@contextlib.contextmanager
def _stop_signals():
    """Count SIGTERM and SIGINT instead of dying of them; a second SIGINT interrupts at once. Gives a function, to be
    called after each step, that says whether to stop there."""
    received: list[int] = []
    others = peers()

    def handle(number, frame):
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    def stop_requested() -> bool:
        if others is None:
            return bool(received)
        if received:
            others.ask_to_stop()
        return others.stopped()

    try:
        previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever owns it handles signals
        previous = {}
    try:
        yield stop_requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
