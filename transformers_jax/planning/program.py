"""A traced training step as a list of operations that says of each array how it is spread over the mesh.

JAX's own layout algorithm runs in XLA, on as many devices as there are. This one is a small copy of its idea that needs
none: layouts go forward from the parameters and the batch, through every operation, and where two that meet disagree,
or a sum over a spread dimension has to be completed, devices have to communicate. Loops stay loops.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

Spread = tuple[tuple[str, ...], ...]
"""The mesh axes that each dimension of an array is spread over."""

BATCH = ("data", "fsdp")


@dataclass(eq=False, slots=True)
class Value:
    """An array. `partial` are the axes over whose devices it has still to be added up; `held` says that it is of the
    state (the first argument), in another form perhaps, and not computed."""

    shape: tuple[int, ...]
    dtype: np.dtype
    spread: Spread
    partial: frozenset[str] = frozenset()
    producer: "Op | None" = None
    held: bool = False

    def parts(self, mesh: Mapping[str, int]) -> int:
        """The number of different parts that the devices hold of it."""
        return math.prod(mesh[axis] for axes in self.spread for axis in axes)

    def bytes(self, mesh: Mapping[str, int]) -> int:
        """Bytes of it on one device."""
        return math.ceil(math.prod(self.shape) / self.parts(mesh)) * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class Loop:
    """The inside of a `scan`: what it reads anew each time, and what each time gives."""

    operations: "list[Op]"
    carries: list[Value]
    slices: list[Value]
    results: list[Value]
    trips: int


@dataclass(eq=False, slots=True)
class Op:
    """An operation. Of a loop the inputs are constants, first carries and arrays cut into slices, in this order.
    `gathered` are copies of inputs of a product that were collected from other devices for it."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    params: Mapping[str, Any] = field(default_factory=dict)
    loop: Loop | None = None
    gathered: list[Value] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What devices along `axis` send one another: `bytes` of the array that each holds before (all_reduce,
    reduce_scatter) or after it (all_gather), so many `times` a step."""

    axis: str
    kind: str
    bytes: float
    times: int


@dataclass
class Program:
    """The operations of a step, its arguments and results, and what is communicated."""

    operations: list[Op]
    arguments: list[Value]
    results: list[Value]
    transfers: list[Transfer]
    mesh: Mapping[str, int]


def read_program(
    step: Callable[..., Any], arguments: Sequence[Any], spreads: Sequence[Spread], mesh: Mapping[str, int]
) -> Program:
    """`step(*arguments)` of abstract arrays; `spreads` has one for each of them, in the order of `jax.tree.leaves`.
    Only what the results depend on is kept."""
    jaxpr = jax.make_jaxpr(step)(*arguments)
    leaves, held = jax.tree.leaves(list(arguments)), len(jax.tree.leaves(arguments[0]))
    known: dict[tuple[int, ...], Spread] = {}
    for leaf, spread in zip(leaves, spreads, strict=True):
        if any(spread):
            # A gradient lies as its parameter does, that of one layer as a layer.
            known.setdefault(tuple(leaf.shape), spread)
            known.setdefault(tuple(leaf.shape[1:]), spread[1:])
    # What a mask is for is known only after it has been made, so the program is read twice.
    reader = _Reader(mesh, known)
    for _ in range(2):
        reader.transfers.clear()
        reader.done.clear()
        inputs = [
            Value(tuple(x.shape), np.dtype(x.dtype), spread, held=place < held)
            for place, (x, spread) in enumerate(zip(leaves, spreads, strict=True))
        ]
        operations, results = reader.read(jaxpr.jaxpr, [reader.constant(x) for x in jaxpr.consts], inputs, 1)
    return Program(_needed(operations, results), inputs, results, reader.transfers, mesh)


class _Reader:
    def __init__(self, mesh: Mapping[str, int], parameters: Mapping[tuple[int, ...], Spread]):
        self.mesh, self.parameters = mesh, parameters
        self.activations: dict[tuple[int, ...], Spread] = {}
        self.transfers: list[Transfer] = []
        self.trips = 1
        self.constants: dict[Any, Value] = {}
        self.done: dict[Any, Any] = {}
        """What has been computed already in this loop: as XLA does, nothing is computed twice."""

    def constant(self, x: Any) -> Value:
        shape = np.shape(x)
        value = Value(shape, np.dtype(getattr(x, "dtype", type(x))), ((),) * len(shape))
        return value if shape else self.constants.setdefault((value.dtype, repr(x)), value)

    def read(
        self, jaxpr: Any, constants: Sequence[Value], inputs: Sequence[Value], trips: int
    ) -> tuple[list[Op], list[Value]]:
        values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True))
        operations: list[Op] = []
        before, self.trips = self.trips, trips

        def value(atom: Any) -> Value:
            return self.constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            name, arguments = equation.primitive.name, [value(atom) for atom in equation.invars]
            inner = _inner(equation)
            if name == "scan":
                operation = self._loop(equation, arguments, trips)
            elif inner is not None:
                inside, results = self.read(inner.jaxpr, [self.constant(x) for x in inner.consts], arguments, trips)
                operations += inside
                values |= zip(equation.outvars, results, strict=True)
                continue
            else:
                key = (name, *map(id, arguments), repr(equation.params))
                if key in self.done:
                    values |= zip(equation.outvars, self.done[key].outputs, strict=True)
                    continue
                operation = self.done[key] = self._operation(equation, arguments)
            for output in operation.outputs:
                output.producer = operation
            operations.append(operation)
            values |= zip(equation.outvars, operation.outputs, strict=True)
        self.trips = before
        return operations, [value(atom) for atom in jaxpr.outvars]

    def _loop(self, equation: Any, arguments: list[Value], trips: int) -> Op:
        params = equation.params
        # Told by their shapes: JAX has changed how it writes down which are constants, carries and slices.
        pairs = zip(equation.invars, params["jaxpr"].jaxpr.invars, strict=True)
        sliced = sum(outer.aval.shape != inner.aval.shape for outer, inner in pairs)
        pairs = zip(equation.outvars, params["jaxpr"].jaxpr.outvars, strict=True)
        carried = sum(outer.aval.shape == inner.aval.shape for outer, inner in pairs)
        first, length = len(equation.invars) - carried - sliced, params["length"]
        constants, initial = arguments[:first], arguments[first : first + carried]
        whole = arguments[first + carried :]
        spreads = [x.spread for x in initial]
        sent, done = len(self.transfers), self.done
        for _ in range(3):  # until what goes round lies the same at the end as at the beginning
            del self.transfers[sent:]
            carries = [Value(x.shape, x.dtype, spread) for x, spread in zip(initial, spreads, strict=True)]
            slices = [Value(x.shape[1:], x.dtype, x.spread[1:], held=x.held) for x in whole]
            closed, self.done = params["jaxpr"], {}
            operations, results = self.read(
                closed.jaxpr,
                [self.constant(x) for x in closed.consts],
                [*constants, *carries, *slices],
                trips * length,
            )
            self.trips = trips * length
            results = [self.settled(x) for x in results]
            self.trips = trips
            after = [x.spread if any(x.spread) else old for x, old in zip(results[:carried], spreads, strict=True)]
            if after == spreads:
                break
            spreads = after
        self.done = done
        outputs = [Value(x.shape, x.dtype, spread) for x, spread in zip(initial, spreads, strict=True)]
        outputs += [Value((length, *x.shape), x.dtype, ((), *x.spread)) for x in results[carried:]]
        return Op("scan", arguments, outputs, params, Loop(operations, carries, slices, results, length))

    def _operation(self, equation: Any, inputs: list[Value]) -> Op:
        name, params = equation.primitive.name, equation.params
        if name == "convert_element_type" and np.dtype(params["new_dtype"]).itemsize > inputs[0].dtype.itemsize:
            inputs = [self.settled(x) for x in inputs]  # before it has more bytes
        elif name in _LINEAR or (name in ("add", "add_any", "sub") and len({x.partial for x in inputs}) == 1):
            pass  # sums that are not complete may be scaled, moved and added
        elif name == "mul" and sum(bool(x.partial) for x in inputs) == 1 and any(x.shape == () for x in inputs):
            pass
        else:
            inputs = [self.settled(x) for x in inputs]
        avals = [variable.aval for variable in equation.outvars]
        shapes = [tuple(getattr(aval, "shape", ())) for aval in avals]
        self.gathered: list[Value] = []
        spreads, partial = self._spreads(name, params, inputs, shapes)
        outputs = []
        for aval, shape, spread in zip(avals, shapes, spreads, strict=True):
            spread = tuple(self._dividing(size, axes) for size, axes in zip(shape, spread, strict=True))
            grown = not inputs or math.prod(shape) > math.prod(inputs[0].shape)
            if name in _FROM_NOTHING and grown and not any(spread):
                spread = self.activations.get(shape, spread)
            elif any(spread):
                self.activations[shape] = spread
            outputs.append(Value(shape, _dtype(aval), spread, partial, held=name in _SAME and inputs[0].held))
        return Op(name, inputs, outputs, params, gathered=self.gathered)

    def _dividing(self, size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        return axes if size % math.prod(self.mesh[axis] for axis in axes) == 0 else ()

    def send(self, axis: str, kind: str, size: float) -> None:
        if self.mesh[axis] > 1:
            self.transfers.append(Transfer(axis, kind, size, self.trips))

    def settled(self, x: Value) -> Value:
        """`x` added up: over `fsdp` each device keeps the part that it holds of the parameter, if `x` is a gradient."""
        if not x.partial:
            return x
        spread = x.spread
        rest = self.parameters.get(x.shape, spread)
        if "fsdp" in x.partial and any("fsdp" in axes for axes in rest):
            self.send("fsdp", "reduce_scatter", x.bytes(self.mesh))
            spread = rest
        elif "fsdp" in x.partial:
            self.send("fsdp", "all_reduce", x.bytes(self.mesh))
        # The same array from here on, for every reader.
        x.spread = spread
        for axis in ("data", "tensor"):
            if axis in x.partial:
                self.send(axis, "all_reduce", x.bytes(self.mesh))
        x.partial = frozenset()
        return x

    def _laid_out(self, x: Value, spec: Any) -> Spread:
        """`x` as a constraint wants it. What it is spread over otherwise has to be gathered. A dimension that
        `jax.vmap` added stays as it is."""
        spec = (*spec, *[None] * (len(x.shape) - len(spec)))
        wanted: Spread = tuple(
            own if axes is PartitionSpec.UNCONSTRAINED else (axes,) if isinstance(axes, str) else tuple(axes or ())
            for axes, own in zip(spec, x.spread, strict=True)
        )
        self._gather(x, _axes(*x.spread) - _axes(*wanted))
        return wanted

    def _gather(self, x: Value, axes: Iterable[str]) -> None:
        root = x
        while root.producer is not None and root.producer.name in ("transpose", "reshape", "copy"):
            root = root.producer.inputs[0]
        for axis in axes:
            if ("all_gather", id(root), axis) in self.done:
                continue
            self.done["all_gather", id(root), axis] = None
            self.send(axis, "all_gather", x.bytes(self.mesh) * self.mesh[axis])

    def _spreads(
        self, name: str, params: Mapping[str, Any], inputs: list[Value], shapes: list[tuple[int, ...]]
    ) -> tuple[list[Spread], frozenset[str]]:
        none: list[Spread] = [((),) * len(shape) for shape in shapes]
        spread: list[tuple[str, ...]]
        if not inputs:
            return none, frozenset()
        x, shape = inputs[0], shapes[0]
        partial = frozenset().union(*(y.partial for y in inputs))
        match name:
            case "dot_general":
                product, partial = self._product(params["dimension_numbers"], *inputs)
                return [product], partial
            case "conv_general_dilated":
                numbers = params["dimension_numbers"]
                spread = [()] * len(shape)
                spread[numbers.out_spec[0]] = x.spread[numbers.lhs_spec[0]]
                return [tuple(spread)], _axes(x.spread[numbers.lhs_spec[1]])
            case "transpose":
                return [tuple(x.spread[i] for i in params["permutation"])], partial
            case "reshape":
                return [_reshaped(x, shape)], partial
            case "broadcast_in_dim":
                spread = [()] * len(shape)
                for source, target in enumerate(params["broadcast_dimensions"]):
                    if x.shape[source] == shape[target]:
                        spread[target] = x.spread[source]
                return [tuple(spread)], partial
            case "squeeze":
                return [tuple(axes for i, axes in enumerate(x.spread) if i not in params["dimensions"])], partial
            case "reduce_sum":
                gone = [x.spread[i] for i in params["axes"]]
                kept = tuple(axes for i, axes in enumerate(x.spread) if i not in params["axes"])
                return [kept], partial | _axes(*gone)
            case "gather":
                return [_gathered(params["dimension_numbers"], x, inputs[1], shape)], frozenset(
                    axis for axes, size, full in zip(x.spread, params["slice_sizes"], x.shape, strict=True)
                    for axis in axes if size != full and axis not in BATCH
                )  # fmt: skip
            case "scatter-add" | "scatter":
                numbers, indices = params["dimension_numbers"], inputs[1]
                added = (i for i in range(len(indices.shape) - 1) if i not in numbers.scatter_indices_batching_dims)
                return [_scattered(numbers, *inputs)], _axes(*(indices.spread[i] for i in added))
            case "sharding_constraint":
                return [self._laid_out(x, params["sharding"].spec)], frozenset()
        if name.startswith(("reduce_", "arg")) and "axes" in params:
            kept = tuple(axes for i, axes in enumerate(x.spread) if i not in params["axes"])
            return [kept] * len(shapes), frozenset()
        found: list[Spread] = []
        for shape in shapes:  # one number for one number, or a dimension of another size, which is whole
            spread = [()] * len(shape)
            for y in inputs:
                if len(y.shape) == len(shape):
                    spread = [
                        axes or (other if size == full else ())
                        for axes, other, size, full in zip(spread, y.spread, y.shape, shape, strict=True)
                    ]
            found.append(_without_doubles(spread))
        return found, partial

    def _product(self, numbers: Any, x: Value, y: Value) -> tuple[Spread, frozenset[str]]:
        (x_contracted, y_contracted), (x_batch, y_batch) = numbers
        spreads = [list(x.spread), list(y.spread)]
        # An axis that spreads different dimensions of both is given up in the one that is not spread over examples.
        sides = ((x, x_contracted, x_batch), (y, y_contracted, y_batch))
        for axis in self.mesh:
            places = [next((i for i, axes in enumerate(spread) if axis in axes), None) for spread in spreads]
            if None in places:
                continue
            roles = [
                ("contracted", list(contracted).index(place)) if place in contracted
                else ("batch", list(batch).index(place)) if place in batch else ("free", 0)
                for place, (_, contracted, batch) in zip(places, sides, strict=True)
            ]  # fmt: skip
            if roles[0] == roles[1] and roles[0][0] != "free":
                continue
            loser = min((0, 1), key=lambda i: math.prod(sides[i][0].shape) / sides[i][0].parts(self.mesh))
            if axis in BATCH:
                loser = next((i for i in (0, 1) if sides[i][0].held), loser)
            self._gather(sides[loser][0], [axis])
            spreads[loser] = [tuple(a for a in axes if a != axis) for axes in spreads[loser]]
        # A parameter is gathered over fsdp whatever it meets.
        for i, (side, contracted, _) in enumerate(sides):
            for axis in ("fsdp",):
                if any(axis in spreads[i][c] for c in contracted) and side.held:
                    self._gather(side, [axis])
                    spreads[i] = [tuple(a for a in axes if a != axis) for axes in spreads[i]]
        self.gathered += [
            Value(side.shape, side.dtype, tuple(spread))
            for (side, _, _), spread in zip(sides, spreads, strict=True)
            if tuple(spread) != side.spread
        ]
        x_spread, y_spread = spreads
        contracted = [x_spread[i] for i in x_contracted] + [y_spread[i] for i in y_contracted]
        batch = [a or b for a, b in ((x_spread[i], y_spread[j]) for i, j in zip(x_batch, y_batch, strict=True))]
        free = [axes for i, axes in enumerate(x_spread) if i not in (*x_contracted, *x_batch)]
        free += [axes for i, axes in enumerate(y_spread) if i not in (*y_contracted, *y_batch)]
        spread = _without_doubles([*batch, *free])
        return spread, _axes(*contracted)


_LINEAR = ("reshape", "transpose", "convert_element_type", "neg", "copy", "squeeze", "broadcast_in_dim", "reduce_sum")
_SAME = ("reshape", "transpose", "convert_element_type", "copy", "squeeze", "pad", "sharding_constraint")
"""What these give is what they are given, in another form."""
_FROM_NOTHING = ("random_bits", "threefry2x32", "iota", "broadcast_in_dim")
"""What these give lies as others of its shape do: it is made where it is read."""


def _inner(equation: Any) -> Any:
    """The program inside a call, with its constants."""
    params = equation.params
    if equation.primitive.name in ("while", "reduce"):
        return None
    if equation.primitive.name == "cond":
        return max(params["branches"], key=lambda branch: len(branch.jaxpr.eqns))
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in params:
            inner = params[name]
            return inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())
    return None


def _dtype(aval: Any) -> np.dtype:
    try:
        return np.dtype(aval.dtype)
    except TypeError:  # a random key: two words
        return np.dtype("uint64")


def _axes(*spread: tuple[str, ...]) -> frozenset[str]:
    return frozenset(axis for axes in spread for axis in axes)


def _without_doubles(spread: Sequence[tuple[str, ...]]) -> Spread:
    seen: set[str] = set()
    result = []
    for axes in spread:
        result.append(tuple(axis for axis in axes if axis not in seen))
        seen |= set(axes)
    return tuple(result)


def _reshaped(x: Value, shape: tuple[int, ...]) -> Spread:
    """Dimensions that are merged or cut keep the layout of the first of them."""
    spread: list[tuple[str, ...]] = [()] * len(shape)
    i = j = 0
    while i < len(x.shape) and j < len(shape):
        first, last = (i, j), [x.shape[i], shape[j]]
        i, j = i + 1, j + 1
        while last[0] != last[1]:
            if last[0] < last[1] and i < len(x.shape):
                last[0] *= x.shape[i]
                i += 1
            elif j < len(shape):
                last[1] *= shape[j]
                j += 1
            else:
                break
        axes = next((x.spread[k] for k in range(first[0], i) if x.spread[k]), ())
        target = next((k for k in range(first[1], j) if shape[k] > 1), first[1])
        spread[target] = axes
    return tuple(spread)


def _gathered(numbers: Any, x: Value, indices: Value, shape: tuple[int, ...]) -> Spread:
    """Dimensions of the indices first, then those of the operand that are taken whole."""
    of_indices = iter(indices.spread)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    of_operand = iter([axes for i, axes in enumerate(x.spread) if i not in gone])
    spread = [next(of_operand, ()) if i in numbers.offset_dims else next(of_indices, ()) for i in range(len(shape))]
    return _without_doubles(spread)


def _scattered(numbers: Any, x: Value, indices: Value, updates: Value) -> Spread:
    spread = list(x.spread)
    for place, other in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        spread[place] = spread[place] or indices.spread[other]
    return _without_doubles(spread)


def _needed(operations: list[Op], results: Sequence[Value]) -> list[Op]:
    """The operations that the results depend on."""
    wanted = set(results)
    kept = []
    for operation in reversed(operations):
        if not wanted.intersection(operation.outputs):
            continue
        kept.append(operation)
        loop = operation.loop
        if loop is None:
            wanted.update(operation.inputs)
            continue
        carried = len(loop.carries)
        inside = {x for x, output in zip(loop.results, operation.outputs, strict=True) if output in wanted}
        for _ in range(2):  # what is carried is needed where what depends on it is
            body = _needed(loop.operations, list(inside))
            read = {x for inner in body for x in inner.inputs} | inside
            inside |= {result for result, carry in zip(loop.results, loop.carries, strict=False) if carry in read}
        loop.operations = body
        alive = {result for result in loop.results if result in inside}
        first = len(operation.inputs) - carried - len(loop.slices)
        pairs = list(zip(loop.carries, operation.inputs[first : first + carried], strict=True))
        pairs += zip(loop.slices, operation.inputs[first + carried :], strict=True)
        wanted.update(outer for inner, outer in pairs if inner in read or inner in alive)
        wanted.update(x for x in operation.inputs[:first] if x in read)
    return kept[::-1]
