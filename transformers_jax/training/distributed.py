"""Many processes, one run: who they are, how they start and end, and what they tell each other."""

import atexit
import contextlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from transformers_jax.training.peers import LostProcessError, Peers, meet, split_address

__all__ = [
    "DistributedConfig",
    "LostProcessError",
    "compiled_together",
    "exchange",
    "first",
    "in_turn",
    "initialize",
    "launched",
    "note_saved",
    "peers",
    "share_of_batch",
    "together",
    "whole",
]

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedConfig:
    """Which of how many processes this one is. All unset: what SLURM, Open MPI, Kubernetes or Cloud TPU say, and one
    process where none of them says anything."""

    coordinator: str | None = None
    """HOST:PORT of process 0, at which all meet. Unset: JAX_COORDINATOR_ADDRESS, or the launcher's."""
    processes: int | None = None
    """How many processes there are. Unset: JAX_NUM_PROCESSES, or the launcher's; 1 is one process, whatever else."""
    process: int | None = None
    """The number of this one, from 0. Unset: JAX_PROCESS_ID, JOB_COMPLETION_INDEX, or the launcher's."""
    timeout: float = 300.0
    """Seconds to wait at the start for all processes."""
    heartbeat: float = 30.0
    """Seconds after which a machine that does not answer is given up. A process that ends is noticed at once."""

    def __post_init__(self):
        if self.coordinator is not None:
            split_address(self.coordinator)
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"distributed.processes={self.processes} must be at least 1")
        if self.process is not None:
            _check_place(self.process, self.processes)
        for name, least in (("timeout", 1), ("heartbeat", 6)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"distributed.{name}={getattr(self, name)} must be at least {least} s")


class Place(NamedTuple):
    """Where a process stands: process `index` of `count`, and which devices of its machine are its own (None: all)."""

    address: str
    index: int
    count: int
    devices: list[int] | None = None


_peers: Peers | None = None


def initialize(config: DistributedConfig = DistributedConfig()) -> None:
    """Start JAX in many processes; nothing for a single one. To be called before the first JAX computation.

    Settings come first, then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID (JOB_COMPLETION_INDEX where
    that is unset: an Indexed Job or a JobSet), then what `find_place` finds. Raises `ValueError` for settings that are
    incomplete or contradict those of other processes, `TimeoutError` where they do not come together in time.
    """
    global _peers
    place = find_place(config)
    if place is None:
        return
    if _peers is not None or jax.distributed.is_initialized():
        raise ValueError("the processes are connected already; call initialize once")
    _peers = meet(place.address, place.index, place.count, timeout=config.timeout, heartbeat=config.heartbeat)
    # It would take SIGTERM, which the training loop handles.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        local_device_ids=place.devices,
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(config.timeout),
        # For a process that neither ends nor answers; `peers` is quicker with all others.
        heartbeat_timeout_seconds=math.ceil(1.5 * config.heartbeat),
        shutdown_timeout_seconds=30,
    )


@contextlib.contextmanager
def together(
    config: DistributedConfig = DistributedConfig(), *, exit_code: Callable[[BaseException], int] = lambda error: 1
) -> Iterator[None]:
    """`initialize`, and an end for all: an exception in one process ends the others with its message and `exit_code`,
    and without one each waits for the others."""
    global _peers
    try:
        initialize(config)
        yield
        if _peers is not None:
            _peers.leave()
            jax.distributed.shutdown()
            _peers = None
    except BaseException as error:
        if _peers is not None:
            _fail(_peers, error, exit_code(error))
        raise


def launched(environment: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """`(number of this process, how many)` where the environment says that it is one of several."""
    env = os.environ if environment is None else environment
    launcher = _Launcher.of(env)
    count = _chosen(None, env, "JAX_NUM_PROCESSES", launcher.count)
    index = _chosen(None, env, "JAX_PROCESS_ID", launcher.index)
    return None if count is None or index is None or count < 2 else (index, count)


def peers() -> Peers | None:
    """The other processes; None for a single one."""
    if _peers is None and jax.process_count() > 1:
        raise ValueError("start many processes by transformers_jax.training.distributed.initialize, not by JAX's own")
    return _peers


def exchange(value: Any) -> list[Any]:
    """The values (JSON) of all processes, in their order. All call this at the same places."""
    others = peers()
    return [value] if others is None else others.exchange(value)


def first(function: Callable[[], T]) -> T:
    """What `function` gives (JSON) or raises (ValueError, FileNotFoundError) in process 0, in all processes."""
    others = peers()
    if others is None:
        return function()
    answer: dict[str, Any] = {}
    if others.index == 0:
        try:
            answer = {"value": function()}
        except (ValueError, FileNotFoundError) as error:
            answer = {"missing" if isinstance(error, FileNotFoundError) else "wrong": str(error)}
    answer = others.exchange(answer)[0]
    if "missing" in answer:
        raise FileNotFoundError(answer["missing"])
    if "wrong" in answer:
        raise ValueError(answer["wrong"])
    return answer["value"]


def in_turn(function: Callable[[], T]) -> T:
    """`function()` in process 0, and then in all others, which find in caches what it made."""
    others = peers()
    if others is None:
        return function()
    if others.index == 0:
        value = function()
        others.exchange(None)
        return value
    others.exchange(None)
    return function()


def compiled_together(function: Any) -> Callable[..., Any]:
    """A compiled function (`jax.jit`) that runs for the first time when all processes have compiled it.

    Otherwise those that are ready wait for the others inside a collective, and some give up soon (gloo, of CPUs, after
    30 s). All processes call it with the same shapes in the same order.
    """
    if peers() is None:
        return function
    programs: dict[Any, Any] = {}

    def call(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in programs:
            programs[key] = function.lower(*arguments).compile()
            exchange(None)
        return programs[key](*arguments)

    return call


def note_saved(step: int) -> None:
    """The run can be continued from here, as this process says if it has to end."""
    if _peers is not None:
        _peers.saved = step


def whole(array: Any) -> np.ndarray:
    """All of an array, of which each process may hold a part. All processes call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def share_of_batch(mesh: Mesh) -> tuple[int, int]:
    """Part i of n of each batch is what this process reads: `(i, n)`.

    Processes whose devices share the same examples (`tensor` reaches over them) read the same part. Raises `ValueError`
    where the processes do not divide the batch into equal parts.
    """
    if jax.process_count() == 1:
        return 0, 1
    owners = np.array([device.process_index for device in mesh.devices.flat])
    owners = owners.reshape(mesh.shape["data"] * mesh.shape["fsdp"], -1)
    rows = {owner: np.flatnonzero((owners == owner).any(axis=1)) for owner in range(jax.process_count())}
    parts = sorted({tuple(mine.tolist()) for mine in rows.values()})
    flat = [row for part in parts for row in part]
    if flat != list(range(len(owners))) or len({len(part) for part in parts}) > 1:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ValueError(
            f"a mesh of {axes} does not divide the batch evenly over {jax.process_count()} processes with "
            f"{jax.local_device_count()} devices each; use a tensor axis that divides the devices of a process, or is "
            "a multiple of them"
        )
    return parts.index(tuple(rows[jax.process_index()].tolist())), len(parts)


def find_place(config: DistributedConfig, environment: Mapping[str, str] | None = None) -> Place | None:
    """Which process this is, from settings and environment variables; None for a single process.

    - `srun`: SLURM_STEP_NUM_TASKS, SLURM_PROCID, SLURM_STEP_NODELIST. An allocation without `srun` is one process.
    - `mpirun`: OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK. Open MPI 5 does not say where process 0 is: name it.
    - Cloud TPU, also in GKE, and Kubernetes Jobs and JobSets with the `kubernetes` package: what JAX finds out itself.

    Where several tasks of SLURM or Open MPI share a machine, each takes the accelerator of its number there, unless
    CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS says which.
    """
    env = os.environ if environment is None else environment
    launcher = _Launcher.of(env)
    count = _chosen(config.processes, env, "JAX_NUM_PROCESSES", launcher.count)
    if count == 1:
        return None
    address = config.coordinator or env.get("JAX_COORDINATOR_ADDRESS")
    index = _chosen(config.process, env, "JAX_PROCESS_ID", launcher.index)
    if index is None and address is not None and count is not None:
        index = _number(env, "JOB_COMPLETION_INDEX")
    if None in (address, count, index) and (found := _found_by_jax(env, launcher, config.timeout)) is not None:
        if count is None and found.count == 1:
            return None
        address, count = address or found.address, count or found.count
        index = found.index if index is None else index
    given = {"coordinator": address, "processes": count, "process": index}
    if launcher.count is None and all(value is None for value in given.values()):
        return None
    variables = {
        "coordinator": "JAX_COORDINATOR_ADDRESS",
        "processes": "JAX_NUM_PROCESSES",
        "process": "JAX_PROCESS_ID or JOB_COMPLETION_INDEX",
    }
    if missing := [f"distributed.{name} ({variables[name]})" for name, value in given.items() if value is None]:
        known = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise ValueError(f"{' and '.join(missing)} must be set, too: of several processes only {known} is known")
    assert address is not None and count is not None and index is not None
    split_address(address)
    _check_place(index, count)
    return Place(address, index, count, launcher.devices)


@dataclass(frozen=True)
class _Launcher:
    """What `srun` or `mpirun` say: number of processes, number of this one, its accelerators."""

    count: int | None = None
    index: int | None = None
    devices: list[int] | None = None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "_Launcher":
        if "SLURM_STEP_NODELIST" in env and "SLURM_PROCID" in env:
            count, local = _number(env, "SLURM_STEP_NUM_TASKS") or _number(env, "SLURM_NTASKS"), "SLURM_LOCALID"
            index = _number(env, "SLURM_PROCID")
            tasks = []  # on each machine, such as 2(x3),1
            for entry in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
                if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry):
                    tasks += [int(match[1])] * int(match[2] or 1)
            node = _number(env, "SLURM_NODEID") or 0
            beside = tasks[node] if node < len(tasks) else 1
        elif "OMPI_COMM_WORLD_SIZE" in env and "OMPI_COMM_WORLD_RANK" in env:
            count, local = _number(env, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_LOCAL_RANK"
            index, beside = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
        else:
            return cls()
        bound = len(env.get("CUDA_VISIBLE_DEVICES", "").split(",")) < beside and "CUDA_VISIBLE_DEVICES" in env
        place = _number(env, local)
        if place is None or beside == 1 or bound or "JAX_LOCAL_DEVICE_IDS" in env:
            return cls(count, index)
        return cls(count, index, [place])


def _found_by_jax(env: Mapping[str, str], launcher: _Launcher, timeout: float) -> Place | None:
    asks_kubernetes = launcher.count is None and "KUBERNETES_SERVICE_HOST" in env and "TPU_WORKER_ID" not in env
    if asks_kubernetes and ("JOB_COMPLETION_INDEX" not in env or importlib.util.find_spec("kubernetes") is None):
        return None  # a pod of its own, as far as can be known
    try:
        from jax._src.clusters import ClusterEnv  # there is no public way to ask

        address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, math.ceil(timeout)
        )
    except Exception as error:
        raise ValueError(
            f"JAX cannot find out the coordinator ({type(error).__name__}: {' '.join(str(error).split())}); set "
            "distributed.coordinator, distributed.processes and distributed.process"
        ) from error
    if address is None or count is None or index is None:
        return None
    return Place(address, index, count)


def _chosen(setting: int | None, env: Mapping[str, str], name: str, launchers: int | None) -> int | None:
    if setting is not None:
        return setting
    return launchers if (value := _number(env, name)) is None else value


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if text and not text.isdecimal():
        raise ValueError(f"the environment variable {name}={text!r} is not a number")
    return int(text) if text else None


def _check_place(process: int, processes: int | None) -> None:
    if process < 0 or (processes is not None and process >= processes):
        numbers = "at least 0" if processes is None else f"0 to {processes - 1}, as there are {processes} processes"
        raise ValueError(f"distributed.process={process} must be {numbers}")


def _fail(others: Peers, error: BaseException, code: int) -> None:
    if _of_the_runtime(error):
        others.wait_for_the_cause()
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
    others.fail(message, code)
    # JAX would wait at the end for those that are gone.
    atexit.register(_exit_at_once, code)


def _of_the_runtime(error: BaseException | None) -> bool:
    """Whether it may come from a collective that failed. XLA's status is a JaxRuntimeError in most places, and a
    ValueError where the value of an array is read: its message begins with the code."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _exit_at_once(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
