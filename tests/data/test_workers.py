"""Batches from worker processes: the same ones, whatever happens to be computing them, and nothing left behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grain
import numpy as np
import pytest

from transformers_jax.data import IGNORED_LABEL, Ragged, evaluation_batches, training_batches
from transformers_jax.data.workers import WorkerProcesses

ROOT = Path(__file__).resolve().parents[2]


def noisy(index, rng):
    """Like a picture that is changed at random: bytes, not all in one order, and what they were made of."""
    pixels = rng.integers(256, size=(3, 5, 2), dtype=np.uint8)
    return {"pixels": pixels[:, ::-1].transpose(1, 0, 2), "labels": np.int32(index), "noise": rng.random()}


def noisy_dataset(count=11):
    return grain.MapDataset.range(count).seed(7).random_map(noisy)


def ragged():
    lengths = np.random.default_rng(0).integers(1, 30, size=41)
    dataset = grain.MapDataset.range(41).map(lambda i: {"input_ids": np.full(lengths[i], i, np.int32)})
    return Ragged(dataset, lengths, max_length=32, padding={"input_ids": 0})


def take(batches, count=None):
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def same(batches, others):
    assert len(batches) == len(others) > 0
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            assert batch[name].dtype == other[name].dtype
            np.testing.assert_array_equal(batch[name], other[name])


class Alone:
    """Random access to the number of the process, and to what can go wrong there."""

    def __len__(self):
        return 1 << 62

    def __getitem__(self, index):
        if index == 666:
            raise ValueError("cat/3.png: not a whole image")
        if index == 667:
            raise Unsendable(lambda: 0)
        if index == 668:
            time.sleep(60)
        if index == 669:
            sys.exit(3)
        return {"process": os.getpid(), "index": index}


class Unsendable(Exception):
    """Pickle cannot take it to another process."""


def running(process):
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except FileNotFoundError:
        return False
    assert (state, int(parent)) != ("Z", os.getpid()), "a zombie is left"
    return state != "Z"  # of an orphan: containers often have nobody who reaps it


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# The same batches


@pytest.mark.parametrize("start_step, counts", [(0, (1, 3)), (5, (2,))])
def test_training_batches_do_not_depend_on_processes(start_step, counts):
    """Three epochs of random changes, each different from the last, and the same for a run that goes on."""
    options = {"batch_size": 4, "seed": 3}
    whole = take(training_batches(noisy_dataset(), num_threads=0, **options), 9)
    assert len({float(noise) for batch in whole for noise in batch["noise"]}) == 36
    for processes in counts:
        batches = training_batches(noisy_dataset(), start_step=start_step, processes=processes, **options)
        same(take(batches, 9 - start_step), whole[start_step:])
    for threads in (1, 4):
        batches = training_batches(noisy_dataset(), start_step=start_step, num_threads=threads, **options)
        same(take(batches, 9 - start_step), whole[start_step:])


def test_ragged_batches_and_shares_of_hosts_do_not_depend_on_processes():
    options = {"batch_size": 4, "seed": 3, "start_step": 13, "process_index": 1, "process_count": 2}
    expected = take(training_batches(ragged(), num_threads=0, **options), 20)
    same(take(training_batches(ragged(), processes=2, **options), 20), expected)


@pytest.mark.parametrize("make", [noisy_dataset, ragged])
def test_evaluation_batches_do_not_depend_on_processes(make):
    expected = take(evaluation_batches(make(), batch_size=4))
    for options in ({"num_threads": 3}, {"num_threads": 1, "prefetch": 1}, {"processes": 2}):
        same(take(evaluation_batches(make(), batch_size=4, **options)), expected)
    numbers = np.concatenate([batch["example"] for batch in expected])
    assert sorted(numbers[numbers >= 0]) == list(range(len(make())))
    if "labels" in expected[-1]:
        assert (expected[-1]["labels"][expected[-1]["example"] < 0] == IGNORED_LABEL).all()


def test_batches_can_be_written_to():
    """As those of this process can."""
    (batch,) = take(training_batches(noisy_dataset(), batch_size=4, seed=0, processes=1), 1)
    batch["pixels"] += 1


def test_evaluation_waits_until_it_is_asked_unless_told_otherwise():
    seen = []
    dataset = grain.MapDataset.range(8).map(lambda i: seen.append(i) or {"x": np.int32(i)})
    batches = evaluation_batches(dataset, batch_size=2)
    assert not seen
    next(batches)
    assert seen == [0, 1]


# Other processes, light ones


def test_work_is_shared_among_other_processes():
    workers = WorkerProcesses(Alone(), 2)
    processes = {workers[i]["process"] for i in range(6)}
    assert len(processes) == 2 and os.getpid() not in processes
    assert workers[1 << 61]["index"] == 1 << 61
    workers.close()


class Loaded:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return {name for name in sys.modules if "." not in name}, os.environ["JAX_PLATFORMS"], _started()


def _started():
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def test_workers_start_no_device_and_load_no_model():
    workers = WorkerProcesses(Loaded(), 1)
    modules, platforms, started = workers[0]
    assert "numpy" in modules and not modules & {"flax", "optax", "tensorflow", "torch"}
    assert platforms == "cpu" and not started
    workers.close()


def test_functions_of_a_main_program_without_a_guard_go_along(tmp_path):
    """Where multiprocessing would start the program again in every process."""
    program = tmp_path / "program.py"
    program.write_text(
        "import grain, numpy as np\n"
        "from transformers_jax.data import training_batches\n"
        "factor = 3\n"
        "def triple(i): return {'x': np.int32(factor * i)}\n"
        "batches = training_batches(grain.MapDataset.range(4).map(triple), batch_size=4, seed=0, processes=1)\n"
        "print(sorted(next(batches)['x'].tolist()))\n"
    )
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, env=_environment(), timeout=60)
    assert (result.returncode, result.stdout) == (0, "[0, 3, 6, 9]\n"), result.stderr


# What goes wrong


def test_a_bad_example_is_the_same_error_in_this_process():
    workers = WorkerProcesses(Alone(), 1)
    with pytest.raises(ValueError) as caught:
        workers[666]
    assert str(caught.value) == "cat/3.png: not a whole image"  # the traceback comes as a note
    assert "__getitem__" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Unsendable: <function"):
        workers[667]
    assert workers[1]["index"] == 1  # and the process goes on
    workers.close()


def broken(index):
    if index == 5:
        raise ValueError("cat/5.png: not a whole image")
    return {"x": np.int32(index)}


def test_a_bad_example_ends_the_batches_with_its_message():
    for batches in (
        training_batches(grain.MapDataset.range(8).map(broken), batch_size=4, seed=0, processes=2),
        evaluation_batches(grain.MapDataset.range(8).map(broken), batch_size=4, processes=2),
    ):
        with pytest.raises(ValueError) as caught:
            take(batches, 2)
        assert str(caught.value) == "cat/5.png: not a whole image"


def test_a_process_that_dies_is_an_error_and_not_a_long_wait():
    workers = WorkerProcesses(Alone(), 1)
    process = workers[0]["process"]
    os.kill(process, signal.SIGKILL)
    ended = rf"worker process {process} .* ended early, killed by SIGKILL; if memory"
    with pytest.raises(ChildProcessError, match=ended):
        workers[1]
    workers.close()
    workers = WorkerProcesses(Alone(), 1)
    with pytest.raises(ChildProcessError, match="ended early, with code 3"):
        workers[669]
    workers.close()


def test_a_process_that_dies_ends_the_batches():
    dataset = grain.MapDataset.source(Alone())[:600]
    batches = evaluation_batches(dataset, batch_size=2, processes=2)
    os.kill(int(next(batches)["process"][0]), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(ChildProcessError, match="killed by SIGKILL"):
        for _ in range(100):
            next(batches)
    assert time.monotonic() - begin < 5


def test_data_that_cannot_be_pickled_says_so(tmp_path):
    with (
        (tmp_path / "file").open("w") as file,
        pytest.raises(ValueError, match=r"this data cannot be sent to worker processes .*; use 0 of them"),
    ):
        WorkerProcesses([file.buffer], 1)
    with pytest.raises(ValueError, match="the number of worker processes is -1; it must be at least 0"):
        training_batches(noisy_dataset(), batch_size=4, seed=0, processes=-1)


# Nothing is left behind


def test_processes_end_with_the_iterator_though_they_are_busy():
    workers = WorkerProcesses(Alone(), 2)
    processes = {workers[i]["process"] for i in range(2)}
    del workers
    wait_until(lambda: not any(map(running, processes)), seconds=3)

    batches = training_batches(grain.MapDataset.source(Alone()), batch_size=2, seed=0, processes=1)
    (process,) = set(next(batches)["process"].tolist())
    begin = time.monotonic()
    batches.close()
    assert time.monotonic() - begin < 3 and not running(process)


PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
import grain, numpy as np
from transformers_jax.data import training_batches
sys.path.insert(0, {tests!r})
from test_workers import Alone
batches = training_batches(grain.MapDataset.source(Alone()), batch_size=2, seed=0, processes=2)
print(*{{int(next(batches)["process"][0]) for _ in range(40)}}, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_the_main_process_however_that_ends(end):
    """SIGINT as a terminal sends it: to the whole group of processes."""
    command = [sys.executable, "-c", PROGRAM.format(tests=str(Path(__file__).parent))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(), process_group=0
    ) as main:
        assert main.stdout is not None and main.stderr is not None
        processes = [int(number) for number in main.stdout.readline().split()]
        assert len(processes) == 2 and all(map(running, processes))
        (os.killpg if end == signal.SIGINT else os.kill)(main.pid, end)
        main.wait(50)  # a busy machine takes its time over the end of an interpreter
        wait_until(lambda: not any(map(running, processes)))
        said = main.stderr.read()
    assert said.count("Traceback") == (end == signal.SIGINT)  # the main process's own; the others are silent


def _environment():
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
