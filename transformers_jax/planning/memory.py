"""The memory that a step needs beside its state: which arrays are held at the same time.

A compiler does not store every array of a program: what is computed number by number (sums, casts, masks) it computes
where it is read. Stored are the results of matrix products, gathers, reductions and loops, and what these read. Each
lives from the operation that makes it to the last one that reads it; a loop holds all that its runs stack up.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from transformers_jax.planning.program import Op, Program, Value

_STORED = frozenset(
    (
        "dot_general",
        "conv_general_dilated",
        "gather",
        "scatter-add",
        "scatter",
        "sort",
        "while",
        "cumsum",
        "concatenate",
        "dynamic_update_slice",
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "argmax",
        "argmin",
        "top_k",
        "optimization_barrier",
    )
)
"""What these give is stored. (Concatenations and reductions are: several read them as a rule.)"""
_READS_STORED = frozenset(
    (
        "dot_general",
        "conv_general_dilated",
        "scan",
        "while",
        "sort",
        "scatter-add",
        "scatter",
    )
)
"""What these read is stored before."""
_VIEWS = frozenset(
    (
        "reshape",
        "squeeze",
        "copy",
        "name",
        "stop_gradient",
        "expand_dims",
        "sharding_constraint",
        "optimization_barrier",
    )
)
"""The same bytes in another shape."""
_EXPENSIVE = frozenset(
    (
        "exp",
        "log",
        "tanh",
        "logistic",
        "erf",
        "erfc",
        "pow",
        "div",
        "rsqrt",
        "sqrt",
        "sin",
        "cos",
        "log1p",
        "expm1",
        "random_bits",
    )
)
"""Not computed twice: stored if several operations read it."""


def peak_bytes(program: Program, *, fused: Collection[tuple[int, ...]] = ()) -> int:
    """The most bytes that one device holds at a time beside the arguments and the results, which take their places.

    Arrays of the shapes `fused` are not held: a kernel that computes attention in one go keeps no scores.
    """
    outside = [*program.arguments, *program.results]
    return _Peak(program.mesh, fused).of(program.operations, program.results, outside)


def score_shapes(operations: Sequence[Op], head_dim: int) -> set[tuple[int, ...]]:
    """The shapes (batch, heads, q, k) of what attention multiplies out over a head's `head_dim` numbers."""
    found = set()
    for operation in operations:
        if operation.loop is not None:
            found |= score_shapes(operation.loop.operations, head_dim)
        elif operation.name == "dot_general":
            (contracted, _), (batch, _) = operation.params["dimension_numbers"]
            x, output = operation.inputs[0], operation.outputs[0].shape
            if len(batch) == 2 and [x.shape[i] for i in contracted] == [head_dim] and output[-1] == output[-2]:
                found.add(output)
    return found


@dataclass(frozen=True)
class _Peak:
    mesh: Mapping[str, int]
    fused: Collection[tuple[int, ...]]

    def bytes(self, values: Sequence[Value]) -> int:
        return sum(x.bytes(self.mesh) for x in values if x.shape not in self.fused)

    def of(self, operations: Sequence[Op], results: Sequence[Value], outside: Sequence[Value]) -> int:
        return _peak(self, operations, results, set(outside))

    def inside(self, operation: Op) -> int:
        """Bytes that an operation holds while it runs, beside what it reads and gives."""
        if operation.loop is None:
            # XLA writes erfc with an exponential and two quotients, which it stores.
            written_out = 3 * self.bytes(operation.outputs) if operation.name == "erfc" else 0
            return written_out + self.bytes(operation.gathered)
        loop = operation.loop
        return self.of(loop.operations, loop.results, [*loop.carries, *loop.slices, *operation.inputs])


def _peak(sizes: _Peak, operations: Sequence[Op], results: Sequence[Value], free: set[Value]) -> int:
    """`free` are values whose bytes are counted elsewhere."""
    stored = _stored(operations, results)
    roots: dict[Value, frozenset[Value]] = {}

    def roots_of(x: Value) -> frozenset[Value]:
        return roots[x] if x in roots else frozenset([x])

    last: dict[Value, int] = {}
    first: dict[Value, int] = {}
    for place, operation in enumerate(operations):
        read = frozenset().union(*(roots_of(x) for x in operation.inputs))
        for x in operation.outputs:
            if x in stored:
                if operation.name in _STORED or operation.loop is not None:
                    first[x] = place
            else:
                roots[x] = read
        for x in read:
            if x in stored:
                first.setdefault(x, place)  # made when it is first read
                last[x] = place
        if all(x not in stored for x in operation.outputs):
            continue
        for x in operation.outputs:
            last.setdefault(x, place)
    # What is computed lazily is read by those who read it: its roots live until then.
    for place, operation in enumerate(operations):
        for x in operation.inputs:
            for root in roots_of(x):
                last[root] = max(last.get(root, 0), place)
    for x in results:
        for root in roots_of(x):
            last[root] = len(operations)
    now = peak = 0
    born: dict[int, list[Value]] = {}
    dead: dict[int, list[Value]] = {}
    for x, place in first.items():
        if x in free:
            continue
        born.setdefault(place, []).append(x)
        dead.setdefault(last.get(x, place), []).append(x)
    # XLA's CPU backend writes out a column of numbers, as soon as it has it, that it multiplies a product's rows by.
    made = {x: place for place, operation in enumerate(operations) for x in operation.outputs}
    for place, operation in enumerate(operations):
        if operation.name in ("mul", "div") and (column := _column(operation)) is not None:
            copy = operation.outputs[0]
            copy = Value(copy.shape, copy.dtype, copy.spread)
            born.setdefault(made.get(column, place), []).append(copy)
            dead.setdefault(place, []).append(copy)
    for place, operation in enumerate(operations):
        now += sizes.bytes(born.get(place, ()))
        peak = max(peak, now + sizes.inside(operation))
        now -= sizes.bytes(dead.get(place, ()))
    return peak


def _column(operation: Op) -> Value | None:
    """The input that has one number for each row of the other one, which is a matrix product."""
    for x, column in (operation.inputs, operation.inputs[::-1]):
        if column.shape == (*x.shape[:-1], 1) and _is_product(x):
            return column
    return None


def _is_product(x: Value) -> bool:
    producer = x.producer
    if producer is not None and producer.name == "select_n":  # of which a mask leaves a part
        return any(_is_product(case) for case in producer.inputs[1:])
    return producer is not None and producer.name == "dot_general"


def _stored(operations: Sequence[Op], results: Sequence[Value]) -> set[Value]:
    """The arrays that have a place of their own."""
    readers: dict[Value, list[Op]] = {}
    for operation in operations:
        for x in set(operation.inputs):
            readers.setdefault(x, []).append(operation)
    stored: set[Value] = set()
    for operation in operations:
        if operation.name in _STORED or operation.loop is not None:
            stored.update(operation.outputs)
    last = set(results)
    for operation in reversed(operations):
        for x in operation.outputs:
            if x in stored:
                continue
            of_x = readers.get(x, [])
            wanted = any(reader.name in _READS_STORED for reader in of_x) or x in last
            wanted |= operation.name in _EXPENSIVE and len(of_x) > 1
            wanted |= any(reader.name in _VIEWS and reader.outputs[0] in stored for reader in of_x)
            if wanted and operation.name not in _VIEWS and operation.name != "transpose":
                stored.add(x)
            elif wanted:
                # The place is that of what is looked at.
                last.add(operation.inputs[0])
    return stored
