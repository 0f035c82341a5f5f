"""Floating-point operations of a program, counted as XLA's cost analysis counts them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers_jax.planning.program import Op

TRANSCENDENTAL = frozenset(
    (
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "pow",
        "sqrt",
        "rsqrt",
        "cbrt",
        "tanh",
        "tan",
        "sin",
        "cos",
        "atan2",
        "erf",
        "erf_inv",
    )
)
"""XLA counts these apart from the others: one may be many instructions."""
_MOVES = frozenset(
    (
        "broadcast_in_dim",
        "reshape",
        "transpose",
        "squeeze",
        "slice",
        "dynamic_slice",
        "dynamic_update_slice",
        "concatenate",
        "pad",
        "gather",
        "rev",
        "iota",
        "copy",
        "name",
        "split",
        "stop_gradient",
        "optimization_barrier",
        "sharding_constraint",
        "bitcast_convert_type",
        "reduce_precision",
        "convert_element_type",
        "expand_dims",
        "random_wrap",
        "random_unwrap",
        "random_seed",
        "random_split",
        "random_fold_in",
        "random_bits",
        "threefry2x32",
        "while",
        "sort",
    )
)
ERFC = 64
"""XLA writes erfc (of the exact GELU) as quotients of polynomials of about this many operations."""
THREEFRY = 45
"""Integer operations for a random number, about: 20 rounds of add, rotate (two shifts, or) and xor make two words."""


@dataclass(frozen=True)
class Flops:
    """`products`: two for each multiply-add of a matrix product or convolution, what the peak of a chip is given in.
    `other`: one for each number that an elementwise operation gives, or a reduction takes, without transcendental
    functions, of which there are `transcendental`."""

    products: float = 0.0
    other: float = 0.0
    transcendental: float = 0.0

    @property
    def total(self) -> float:
        """What XLA calls flops."""
        return self.products + self.other

    def __add__(self, more: "Flops") -> "Flops":
        return Flops(self.products + more.products, self.other + more.other, self.transcendental + more.transcendental)

    def times(self, count: int) -> "Flops":
        return Flops(self.products * count, self.other * count, self.transcendental * count)


def count_flops(operations: Sequence[Op], *, loops_once: bool = False) -> Flops:
    """Those over all devices. The inside of a loop counts as often as it runs, or once, as in XLA's cost analysis."""
    total = Flops()
    for operation in operations:
        if (loop := operation.loop) is not None:
            total += count_flops(loop.operations, loops_once=loops_once).times(1 if loops_once else loop.trips)
        else:
            total += _of(operation)
    return total


def _of(operation: Op) -> Flops:
    if not operation.outputs:
        return Flops()
    size = math.prod(operation.outputs[0].shape)
    match operation.name:
        case "dot_general":
            (contracted, _), _ = operation.params["dimension_numbers"]
            return Flops(products=2.0 * size * math.prod(operation.inputs[0].shape[i] for i in contracted))
        case "conv_general_dilated":
            kernel, numbers = operation.inputs[1], operation.params["dimension_numbers"]
            return Flops(products=2.0 * size * math.prod(kernel.shape) / kernel.shape[numbers.rhs_spec[0]])
        case "erfc":
            return Flops(other=float(ERFC * size), transcendental=float(size))
        case "random_bits":
            return Flops(other=float(THREEFRY * size))
        case "scatter-add":
            return Flops(other=float(math.prod(operation.inputs[2].shape)))
        case "integer_pow":
            return Flops(other=float(size * (abs(operation.params["y"]).bit_length() - 1)))
        case name if name in TRANSCENDENTAL:
            return Flops(transcendental=float(size))
        case name if name in _MOVES:
            return Flops()
        case name if name.startswith(("reduce_", "arg", "cum")):
            return Flops(other=float(math.prod(operation.inputs[0].shape) - size))
    return Flops(other=float(size))
