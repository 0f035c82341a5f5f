"""Optimizers and learning-rate schedules, all from optax, for models whose layers are stacked on a depth axis.

The one promise optax alone does not keep: an optimizer treats stacked layers `(depth, ...)` exactly as it would treat
the `depth` layers one by one. AdamW, Lion and SGD work on single numbers, so they keep it anyway. Muon needs to be told
which axes form the matrix. Adafactor factors, clips and scales whole arrays, so it is mapped over the depth axis.

Layers are told apart by name, too, for fine-tuning: layer i of a `Stack` whose cycle has c layers is row i // c of the
parameters called `...stack.layers.{i % c}.…`. Those of several stages, `...stages.{s}.stack.layers.…`, are counted
through.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Hashable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from transformers_jax.training.paths import named_leaves, with_leaves

Name = Literal["adamw", "adafactor", "lion", "muon", "sgd"]
ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay"]
DecayRule = Literal["matrices", "kernels", "all", "none"]

# By the last component of the parameter's name, never by its number of axes: stacking adds one.
_DECAYED: dict[str, Callable[[str], bool]] = {
    "matrices": lambda leaf: leaf in ("kernel", "embedding"),
    "kernels": lambda leaf: leaf == "kernel",
    "all": lambda leaf: True,
    "none": lambda leaf: False,
}
# Muon is for hidden matrices: the layers that touch tokens, pixels or labels stay with AdamW.
_INPUT_OR_OUTPUT = re.compile(r"(^|\.)(\w*head|\w*embeddings?)(\.|$)")
_IN_STACK = re.compile(r"(|.*?\.)stack\.layers\.(\d+)\.")
_STAGE = re.compile(r"(|.*?\.)stages\.(\d+)\.")
# What a backbone has before its stack: token, patch and position embeddings, their norm and projection, and tokens of
# its own (class_token, distillation_token).
_EMBEDDINGS = re.compile(r"(embed|position|token_type|patch|\w+_token)\w*(\.|$)")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How the parameters are updated. Everything is counted in optimizer updates, whatever the accumulation."""

    name: Name = "adamw"
    """adamw; adafactor (saves memory); lion; muon (hidden matrices by Muon, the rest by AdamW); sgd (with momentum)."""
    learning_rate: float = 1e-3
    """Peak learning rate. For adafactor it is relative to each parameter's root mean square."""
    schedule: ScheduleName = "cosine"
    """Shape after the warm-up. warmup_stable_decay holds the peak, then falls linearly."""
    warmup_steps: int = 0
    """Updates of linear warm-up from 0 to the peak. With a warm-up, update 0 has learning rate 0."""
    warmup_fraction: float | None = None
    """The warm-up as a share of all updates, rounded, instead of warmup_steps."""
    decay_fraction: float = 0.1
    """warmup_stable_decay only: the share of all updates spent in the final decay."""
    final_fraction: float = 0.0
    """Learning rate at the end, as a fraction of the peak (a floor for inverse_sqrt; constant ignores it)."""
    beta1: float = 0.9
    """Decay of the first moment (adamw, lion, and the AdamW part of muon)."""
    beta2: float | None = None
    """Decay of the second moment (adamw, muon) or of the momentum (lion). None: 0.99 for lion, else 0.999."""
    epsilon: float = 1e-8
    """Added to the denominator (adamw, muon)."""
    momentum: float | None = None
    """Momentum of sgd and muon. None: 0.9 for sgd, 0.95 for muon."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each update also subtracts learning rate * weight decay * parameter."""
    decay_rule: DecayRule = "matrices"
    """What decays, by the parameter's name: matrices (kernels and embeddings), kernels, all, none."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient, over all parameters that are trained. None or 0: no clipping."""
    moment_dtype: Literal["parameter", "float32", "bfloat16"] = "parameter"
    """Storage type of the first moment (not for adafactor, which keeps none). parameter: as the parameter."""
    factor_above: int = 128
    """adafactor only: matrices whose two larger axes have at least this size keep row and column statistics."""
    layer_decay: float = 1.0
    """Learning rate of a layer relative to the next one's: the head has the full rate, the embeddings the lowest."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: regular expressions searched in their names."""
    frozen_layers: int | None = None
    """The first layers that are not trained, together with the embeddings (0: only these). None: all are trained."""

    def __post_init__(self) -> None:
        for field, choices in (("name", Name), ("schedule", ScheduleName), ("decay_rule", DecayRule)):
            _require(getattr(self, field) in get_args(choices), self, field, f"one of {', '.join(get_args(choices))}")
        for field in ("learning_rate", "warmup_steps", "epsilon", "weight_decay"):
            _require(getattr(self, field) >= 0, self, field, "0 or more")
        for field in ("decay_fraction", "final_fraction", "warmup_fraction"):
            value = getattr(self, field)
            _require(value is None or 0 <= value <= 1, self, field, "between 0 and 1")
        if self.warmup_fraction is not None and self.warmup_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} and warmup_fraction={self.warmup_fraction} are two "
                             "lengths of one warm-up; give one of them")  # fmt: skip
        for field in ("beta1", "beta2", "momentum"):
            value = getattr(self, field)
            _require(value is None or 0 <= value < 1, self, field, "at least 0 and below 1")
        _require(self.clip_norm is None or self.clip_norm >= 0, self, "clip_norm", "0 or more (0 or None: off)")
        _require(self.moment_dtype in ("parameter", "float32", "bfloat16"), self, "moment_dtype",
                 "one of parameter, float32, bfloat16")  # fmt: skip
        _require(self.factor_above >= 1, self, "factor_above", "1 or more")
        _require(0 < self.layer_decay <= 1, self, "layer_decay", "above 0 and at most 1")
        _require(self.frozen_layers is None or self.frozen_layers >= 0, self, "frozen_layers", "0 or more, or None")
        for pattern in self.frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"frozen: {pattern!r} is not a regular expression: {error}") from None
        if self.name == "adafactor" and self.moment_dtype != "parameter":
            raise ValueError(f"moment_dtype={self.moment_dtype!r} has no meaning for adafactor, which keeps no first "
                             "moment; leave it at 'parameter'")  # fmt: skip


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate of update n, for n = 0 ... `total_steps` - 1; later updates keep the final value.

    With w warm-up steps, N in total and peak p: update n < w has p * n / w, so update 0 has 0. Then, with
    t = (n - w) / (N - w): linear p * (1 - t), cosine p * (1 + cos(pi * t)) / 2, both raised to end at
    `final_fraction` * p; inverse_sqrt p * sqrt(w / n) (without warm-up p * sqrt(10,000 / (n + 10,000)));
    warmup_stable_decay p until the last `decay_fraction` * N updates, which fall linearly. These are the formulas of
    `transformers.get_*_schedule_with_warmup`.

    A run shorter than its warm-up ends inside it, and a final decay longer than what the warm-up leaves is cut to that:
    a recipe can be tried for a few steps without being rewritten.
    """
    if total_steps < 1:
        raise ValueError(f"total_steps is {total_steps}, but a schedule needs at least 1 update")
    peak, warmup = config.learning_rate, _warmup_steps(config, total_steps)
    after = _after_warmup(config, total_steps)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def _warmup_steps(config: OptimizerConfig, total_steps: int) -> int:
    return config.warmup_steps if config.warmup_fraction is None else round(config.warmup_fraction * total_steps)


def _after_warmup(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The schedule counted from the end of the warm-up."""
    peak, warmup = config.learning_rate, _warmup_steps(config, total_steps)
    final, steps = peak * config.final_fraction, max(0, total_steps - warmup)
    match config.schedule:
        case "constant":
            return optax.constant_schedule(peak)
        case "linear" | "cosine" if steps == 0:
            return optax.constant_schedule(final)
        case "linear":
            return optax.linear_schedule(peak, final, steps)
        case "cosine":
            return optax.cosine_decay_schedule(peak, steps, alpha=config.final_fraction)
        case "inverse_sqrt":
            timescale = warmup or 10_000

            def inverse_sqrt(count):
                count = jnp.clip(count, 0, steps)
                return jnp.maximum(peak * jnp.sqrt(timescale / (count + timescale)), final)

            return inverse_sqrt
        case "warmup_stable_decay":
            decay = min(round(config.decay_fraction * total_steps), steps)
            if decay == 0:
                return optax.constant_schedule(peak)
            return optax.linear_schedule(peak, final, decay, transition_begin=steps - decay)


def make_optimizer(
    config: OptimizerConfig, total_steps: int, model: Any, *, stacked: Any = False
) -> optax.GradientTransformation:
    """The optimizer for `model`: clip, direction, decoupled weight decay, learning rate, layer decay.

    `model` is any pytree of parameters (an `nnx.Module` too), or its abstract form from `jax.eval_shape`; only names
    and shapes are read. `stacked` is a bool or a tree of bools like the model (or a prefix of it): True where a
    parameter has a leading depth axis. The returned `init` and `update` take trees like `model`; inside, the state is
    kept in plain dictionaries by parameter name, so it does not depend on Flax.

    With `layer_decay` d, the update of layer i of L is d ** (L - i) times as large, that of the embeddings d ** (L + 1)
    times (Clark et al. 2020, ELECTRA; Bao et al. 2021, BEiT). What is frozen keeps its bits: no update, no decay, no
    moments, no part in the norm that clips. Raises `ValueError` for a pattern of `frozen` that matches no name, for
    more `frozen_layers` than there are, and where nothing is left to train.
    """
    shapes, depth_axis = _shapes(model, stacked)
    decayed = {name: _DECAYED[config.decay_rule](name.rsplit(".", 1)[-1]) for name in shapes}
    trained = trained_part(config, model, stacked=stacked)
    shapes = {name: leaf.shape for name, leaf in jax.eval_shape(trained, model).items()}

    parts = []
    if config.clip_norm:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    parts.append(_direction(config, shapes, depth_axis))
    if config.weight_decay and any(decayed[name] for name in shapes):
        parts.append(optax.add_decayed_weights(config.weight_decay, mask={name: decayed[name] for name in shapes}))
    parts.append(optax.scale_by_learning_rate(make_schedule(config, total_steps)))
    if config.layer_decay != 1:
        parts.append(_layer_decay(config, model, stacked))
    inner = optax.chain(*parts)

    def init(params: Any) -> Any:
        return inner.init(trained(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        directions: Any
        directions, state = inner.update(trained(updates), state, None if params is None else trained(params))
        every = {name: _with_frozen_rows(directions.get(name), leaf) for name, leaf in named_leaves(updates).items()}
        return with_leaves(updates, every), state

    return optax.GradientTransformation(init, update)


def trained_part(config: OptimizerConfig, model: Any, *, stacked: Any = False) -> Callable[[Any], dict[str, Any]]:
    """A function from a tree like `model` to what is trained of it, by name: without the parameters that are frozen,
    and of stacked ones without the first rows if those are. Arguments and errors are those of `make_optimizer`."""
    shapes, depth_axis = _shapes(model, stacked)
    frozen_rows = dict.fromkeys(shapes, 0)
    for pattern in config.frozen:
        matching = [name for name in shapes if re.search(pattern, name)]
        if not matching:
            others = f" and {len(shapes) - 10} more" if len(shapes) > 10 else ""
            raise ValueError(f"frozen: no parameter's name has {pattern!r} in it; there are "
                             f"{', '.join(list(shapes)[:10])}{others}")  # fmt: skip
        frozen_rows |= {name: _rows(shapes[name], depth_axis[name]) for name in matching}
    if config.frozen_layers is not None:
        depth, layers = _layers(shapes, depth_axis, "frozen_layers")
        if config.frozen_layers > depth:
            raise ValueError(f"frozen_layers is {config.frozen_layers} but the model has {depth} layers")
        for name, numbers in layers.items():
            frozen_rows[name] = max(frozen_rows[name], int(np.sum(numbers < config.frozen_layers)))
    kept = {name: rows for name, rows in frozen_rows.items() if rows < _rows(shapes[name], depth_axis[name])}
    if not kept:
        raise ValueError("all parameters are frozen; nothing is left to train")

    def trained(tree: Any) -> dict[str, Any]:
        named = named_leaves(tree)
        return {name: named[name][rows:] if rows else named[name] for name, rows in kept.items()}

    return trained


def _shapes(model: Any, stacked: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, bool]]:
    """Shape, and whether there is a depth axis, by name."""
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(model).items()}
    depth_axis = named_leaves(jax.tree.broadcast(stacked, model))
    for name, shape in shapes.items():
        if depth_axis[name] and not shape:
            raise ValueError(f"{name} is marked as stacked but is a scalar without a depth axis; unmark it")
    return shapes, depth_axis


def _rows(shape: tuple[int, ...], depth_axis: bool) -> int:
    return shape[0] if depth_axis else 1


def _layers(
    shapes: dict[str, tuple[int, ...]], depth_axis: dict[str, bool], field: str
) -> tuple[int, dict[str, np.ndarray]]:
    """The number of layers, and the layer of each row of each parameter: -1 for the embeddings, and the number of
    layers for what comes after them. A parameter without a depth axis is one row."""
    matches = {name: match for name in shapes if (match := _IN_STACK.match(name))}
    prefixes = {match[1] for match in matches.values()}
    stages = [match for prefix in prefixes if (match := _STAGE.fullmatch(prefix))]
    if len(prefixes) > 1 and (len(stages) < len(prefixes) or len({match[1] for match in stages}) > 1):
        raise ValueError(f"{field} needs a model with one stack of layers, or one in each stage; this one has "
                         f"{len(prefixes)}: {', '.join(prefix + 'stack' for prefix in sorted(prefixes))}")  # fmt: skip
    backbone = stages[0][1] if stages else next(iter(prefixes), "")
    depth, first, cycles = 0, {}, {}  # of all stacks; the number of the first layer of each, and how long its cycle is
    for prefix in sorted(prefixes, key=lambda prefix: int(match[2]) if (match := _STAGE.fullmatch(prefix)) else 0):
        inside = {name: match for name, match in matches.items() if match[1] == prefix}
        first[prefix], cycles[prefix] = depth, 1 + max(int(match[2]) for match in inside.values())
        depth += cycles[prefix] * max(_rows(shapes[name], depth_axis[name]) for name in inside)
    layers = {}
    for name, shape in shapes.items():
        rows = _rows(shape, depth_axis[name])
        stage = next((prefix for prefix in first if _STAGE.fullmatch(prefix) and name.startswith(prefix)), None)
        if name in matches:
            prefix = matches[name][1]
            layers[name] = first[prefix] + np.arange(rows) * cycles[prefix] + int(matches[name][2])
        elif stage is not None:  # what makes the map of a stage goes with the layer before it
            layers[name] = np.full(rows, first[stage] - 1)
        else:
            before = name.startswith(backbone) and _EMBEDDINGS.match(name, len(backbone))
            layers[name] = np.full(rows, -1 if before else depth)
    return depth, layers


def _layer_decay(config: OptimizerConfig, model: Any, stacked: Any) -> optax.GradientTransformation:
    depth, layers = _layers(*_shapes(model, stacked), "layer_decay")
    factors = {name: config.layer_decay ** (depth - numbers) for name, numbers in layers.items()}

    def scale(name: str, update: Any) -> Any:
        factor = factors[name]
        if len(factor) == 1:
            return update * jnp.asarray(factor[0], update.dtype)
        factor = factor[len(factor) - len(update) :]  # of the rows that are trained
        return update * jnp.asarray(factor, update.dtype).reshape(-1, *[1] * (update.ndim - 1))

    def scale_all(updates: Any, _: Any) -> Any:
        return {name: scale(name, update) for name, update in updates.items()}

    return optax.stateless(scale_all)


def _with_frozen_rows(update: Any, leaf: Any) -> Any:
    """The update of the whole of `leaf` from that of its last rows, or from None. Adding -0.0 changes no bit."""
    if update is None:
        return jnp.full_like(leaf, -0.0)
    if update.shape == leaf.shape:
        return update
    return jnp.concatenate([jnp.full_like(leaf[: len(leaf) - len(update)], -0.0), update])


def _direction(
    config: OptimizerConfig, shapes: dict[str, tuple[int, ...]], depth_axis: dict[str, bool]
) -> optax.GradientTransformation:
    """The ascent direction, before weight decay and learning rate, over a dictionary of parameters."""
    dtype = None if config.moment_dtype == "parameter" else jnp.dtype(config.moment_dtype)
    beta2 = config.beta2 if config.beta2 is not None else 0.99 if config.name == "lion" else 0.999
    match config.name:
        case "adamw":
            return optax.scale_by_adam(config.beta1, beta2, config.epsilon, mu_dtype=dtype)
        case "lion":
            return optax.scale_by_lion(config.beta1, beta2, mu_dtype=dtype)
        case "sgd":
            momentum = 0.9 if config.momentum is None else config.momentum
            return optax.trace(momentum, accumulator_dtype=dtype) if momentum else optax.identity()
        case "adafactor":
            adafactor = optax.adafactor(learning_rate=None, min_dim_size_to_factor=config.factor_above)
            labels = {name: str(shape[0]) if depth_axis[name] else "single" for name, shape in shapes.items()}
            each: dict[Hashable, optax.GradientTransformation] = {
                label: adafactor if label == "single" else _over_depth(adafactor) for label in labels.values()
            }
            return optax.chain(optax.partition(each, labels), optax.scale(-1.0))
        case "muon":
            muon = optax.contrib.scale_by_muon(
                beta=0.95 if config.momentum is None else config.momentum,
                eps=config.epsilon,
                mu_dtype=dtype,
                # The last two axes form the matrix, whether there is a depth axis before them or not.
                weight_dimension_numbers=lambda updates: jax.tree.map(
                    lambda update: optax.contrib.MuonDimensionNumbers(update.ndim - 2, update.ndim - 1), updates
                ),
            )
            rescale = optax.stateless_with_tree_map(_as_large_as_adamw)
            adamw = optax.scale_by_adam(config.beta1, beta2, config.epsilon, mu_dtype=dtype)
            labels = {
                name: "muon" if _is_hidden_matrix(name, len(shape) - depth_axis[name]) else "adamw"
                for name, shape in shapes.items()
            }
            return optax.partition({"muon": optax.chain(muon, rescale), "adamw": adamw}, labels)


def _as_large_as_adamw(update: Any, _: Any) -> Any:
    """Scale an orthogonal update to AdamW's usual size (arXiv:2502.16982): one learning rate and decay serve both."""
    return 0.2 * math.sqrt(max(update.shape[-2:])) * update


def _over_depth(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation to each layer of stacked parameters on its own (its state gains the depth axis too)."""

    def init(params: Any) -> Any:
        return jax.vmap(transformation.init)(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.vmap(transformation.update)(updates, state, params)

    return optax.GradientTransformation(init, update)


def _is_hidden_matrix(name: str, axes: int) -> bool:
    """What Muon is for. Embeddings, heads, norms, biases and convolutions are left to AdamW."""
    return name.rsplit(".", 1)[-1] == "kernel" and axes == 2 and not _INPUT_OR_OUTPUT.search(name)


def _require(condition: bool, config: OptimizerConfig, field: str, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{field} is {getattr(config, field)!r} but must be {wanted}")
