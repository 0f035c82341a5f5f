"""Many processes: that they find each other or say why not, compute what one computes, and none outlives another."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from transformers_jax.cli import main
from transformers_jax.training import distributed
from transformers_jax.training.distributed import (
    DistributedConfig,
    LostProcessError,
    Place,
    find_place,
    launched,
    share_of_batch,
)
from transformers_jax.training.peers import Peers, meet

REPOSITORY = Path(__file__).parents[2]
NOTICED_IN = 60.0  # seconds, of which the network needs less than one

# --- which process this is

SRUN = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MPIRUN = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
JOBSET = {"JAX_COORDINATOR_ADDRESS": "run-0-0.run:1234", "JAX_NUM_PROCESSES": "8", "JOB_COMPLETION_INDEX": "5"}


@pytest.fixture
def environment(monkeypatch):
    """Sets exactly these of the variables that launchers set."""

    def use(variables):
        for name in os.environ:
            if name.startswith(("SLURM_", "OMPI_", "JAX_COORD", "JAX_NUM_PROC", "JAX_PROC", "JOB_", "KUBERN")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.parametrize(
    ("variables", "config", "place"),
    [
        ({}, DistributedConfig(), None),
        ({}, DistributedConfig("10.0.0.1:99", 3, 2), Place("10.0.0.1:99", 2, 3)),
        ({"JAX_COORDINATOR_ADDRESS": "a:99", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "0"}, DistributedConfig(),
         Place("a:99", 0, 3)),
        (JOBSET, DistributedConfig(), Place("run-0-0.run:1234", 5, 8)),
        (JOBSET, DistributedConfig(processes=1), None),
        ({"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, DistributedConfig(), None),
        (SRUN, DistributedConfig(), Place("node07:61445", 1, 2)),  # 61440 + 5: JAX's rule
        (SRUN, DistributedConfig(coordinator="10.0.0.1:99"), Place("10.0.0.1:99", 1, 2)),
        # Two tasks on the second of two machines: each takes its own accelerator there, unless it is given one.
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_LOCALID": "1"}, DistributedConfig(),
         Place("node07:61445", 1, 2, [1])),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "1"},
         DistributedConfig(), Place("node07:61445", 1, 2)),
        # An allocation, and its shell, in which a single process is started.
        (SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, DistributedConfig(), None),
        (SRUN | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, DistributedConfig(), None),
        ({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, DistributedConfig(), None),
        (MPIRUN, DistributedConfig(), Place("10.96.0.1:62624", 3, 4, [1])),
    ],
)  # fmt: skip
def test_the_place_of_a_process_is_what_settings_or_launchers_say(environment, variables, config, place):
    environment(variables)
    assert find_place(config) == place


def test_half_of_the_settings_are_an_error_that_names_the_others(environment):
    environment({})
    with pytest.raises(ValueError, match=r"distributed.processes \(JAX_NUM_PROCESSES\) and distributed.process "):
        find_place(DistributedConfig(coordinator="10.0.0.1:99"))
    with pytest.raises(ValueError, match=r"distributed.coordinator .* only processes 2, process 1 is known"):
        find_place(DistributedConfig(processes=2, process=1))
    environment({"JAX_COORDINATOR_ADDRESS": "a:99", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"})
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES='two' is not a number"):
        find_place(DistributedConfig())
    environment(JOBSET | {"JOB_COMPLETION_INDEX": "8"})
    with pytest.raises(ValueError, match=r"process=8 must be 0 to 7, as there are 8 processes"):
        find_place(DistributedConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--distributed.coordinator", "10.0.0.1"], "the coordinator '10.0.0.1' is not HOST:PORT"),
        (["--distributed.coordinator", "host:http"], "the coordinator 'host:http' is not HOST:PORT"),
        (["--distributed.process", "2", "--distributed.processes", "2"], "process=2 must be 0 to 1, as there are 2"),
        (["--distributed.processes", "0"], "processes=0 must be at least 1"),
        (["--distributed.timeout", "0"], "timeout=0.0 must be at least 1 s"),
        (["--distributed.coordinator", "10.0.0.1:99"], "JAX_NUM_PROCESSES"),
    ],
)
def test_impossible_settings_are_one_line_and_exit_code_2(environment, capsys, settings, message):
    environment({})
    with pytest.raises(SystemExit) as exit:
        main(["train", "--config", "gpt_python_docs", *settings])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and message in error, error


def test_commands_for_a_single_process_refuse_to_be_started_in_many(environment, capsys):
    environment(SRUN)
    assert launched() == (1, 2)
    with pytest.raises(SystemExit) as exit:
        main(["evaluate", "--checkpoint", "nowhere"])
    assert exit.value.code == 2 and "this is process 1 of 2; start it once" in capsys.readouterr().err


def test_configs_are_read_before_jax_looks_for_devices():
    """Otherwise JAX could not be told of the other processes any more."""
    script = """
        import sys
        from pathlib import Path
        from transformers_jax.experiment import load_config
        from transformers_jax.training.process import prepare_process
        prepare_process()
        for config in Path("configs").glob("*.py"):
            load_config(str(config))
        from jax._src import xla_bridge
        sys.exit(xla_bridge.backends_are_initialized())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=REPOSITORY, check=True, timeout=120)


# --- how they meet


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def gather(places, *, timeout=20.0):
    """What `meet` gives, or raises, in processes that say they are (index, count)."""
    address = f"127.0.0.1:{free_port()}"

    def one(place):
        try:
            return meet(address, *place, timeout=timeout, heartbeat=30)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(places)) as pool:
        return address, list(pool.map(one, places))


def test_processes_exchange_values_and_stop_at_the_same_call():
    _, processes = gather([(2, 3), (0, 3), (1, 3)])
    ended = {}

    def work(peers):
        assert peers.exchange(["a", peers.index]) == [["a", 0], ["a", 1], ["a", 2]]
        assert peers.exchange(None) == [None] * 3
        calls = 0
        while not peers.stopped():
            calls += 1
            if peers.index == 1 and calls == 5:
                peers.ask_to_stop()
            time.sleep(0.001 * (1 + peers.index))  # each at its own speed, as far as this may go
        ended[peers.index] = calls
        peers.leave()

    threads = [threading.Thread(target=work, args=[peers]) for peers in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(ended.values())) == 1 and ended[0] >= 5, ended


def test_who_is_missing_is_named_after_the_time_limit():
    address, errors = gather([(0, 4), (2, 4)], timeout=2)
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert str(error).startswith(f"2 of 4 processes came to {address} within 2 s; missing: process 1, 3")


def test_an_unreachable_coordinator_is_an_error_after_the_time_limit():
    begin = time.monotonic()
    address, (error,) = gather([(1, 2)], timeout=1.5)
    assert isinstance(error, TimeoutError) and time.monotonic() - begin < 20
    assert str(error).startswith(f"process 1 of 2 did not reach the coordinator at {address} within 1.5 s (")


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, 2), (1, 3)], "process 1 says 3 processes, process 0 says 2; start all alike"),
        ([(0, 3), (1, 3), (1, 3)], "two processes are process 1 of 3; give each a number of its own"),
    ],
)
def test_processes_that_contradict_each_other_all_hear_it(places, message):
    _, errors = gather(places)
    for error in errors:
        assert isinstance(error, ValueError) and str(error) == message


def test_a_port_with_another_program_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve():
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0\r\n")
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(LostProcessError, match=f"or another program listens at 127.0.0.1:{port}"):
            meet(f"127.0.0.1:{port}", 1, 2, timeout=5, heartbeat=30)


def knock(address, line):
    """A connection to whoever listens at `address`, once somebody does, over which `line` was sent."""
    host, port = address.split(":")
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection((host, int(port)), timeout=20)
            connection.sendall(line)
            return connection
        time.sleep(0.02)


def test_other_programs_that_knock_at_the_port_are_sent_away():
    address = f"127.0.0.1:{free_port()}"

    def join():
        for line in (b"GET / HTTP/1.0\r\n", b"[1]\n", b'{"greeting": "transformers_jax"}\n'):
            with knock(address, line) as connection, contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        return meet(address, 1, 2, timeout=20, heartbeat=30)

    with ThreadPoolExecutor(2) as pool:
        meeting = [pool.submit(meet, address, 0, 2, timeout=20, heartbeat=30), pool.submit(join)]
        leaving = [pool.submit(process.result().leave) for process in meeting]
        assert [result.result() for result in leaving] == [None, None]


def test_a_process_that_ends_before_all_have_met_is_missed_at_once():
    address = f"127.0.0.1:{free_port()}"
    greeting = {"greeting": "transformers_jax", "process": 1, "processes": 3, "jax": jax.__version__}
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet, address, 0, 3, timeout=60, heartbeat=30)
        knock(address, json.dumps(greeting).encode() + b"\n").close()
        with pytest.raises(LostProcessError, match="process 1 of 3 ended while the others were starting"):
            meeting.result(10)


class RecordedPeers(Peers):
    def __init__(self):
        self.told = []

    def wait_for_the_cause(self):
        self.told.append("waited")

    def fail(self, message, code):
        self.told.append((message, code))


def wrapped(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: connection closed by peer"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), True),  # while an array is saved
        (wrapped(RuntimeError("not saved"), ValueError("UNAVAILABLE: Socket closed")), True),
        (ValueError("training.steps=0 must be at least 1"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_collective_that_failed_has_its_cause_elsewhere(monkeypatch, error, waits):
    peers = RecordedPeers()
    monkeypatch.setattr(distributed, "initialize", lambda config: None)
    monkeypatch.setattr(distributed, "_peers", peers)
    monkeypatch.setattr("atexit.register", lambda *arguments: None)
    with pytest.raises(type(error)), distributed.together(exit_code=lambda error: 2):
        raise error
    message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    assert peers.told == ["waited"] * waits + [(message, 2)]


# --- who reads what


class Device:
    platform = device_kind = "cpu"

    def __init__(self, number, process_index):
        self.id, self.process_index = number, process_index


def mesh_of(data, fsdp, tensor, processes):
    count = data * fsdp * tensor
    devices = np.array([Device(number, number // (count // processes)) for number in range(count)])
    return Mesh(devices.reshape(data, fsdp, tensor), ("data", "fsdp", "tensor"))


@pytest.mark.parametrize(
    ("axes", "processes", "parts"),
    [
        ((8, 1, 1), 2, [(0, 2), (1, 2)]),
        ((2, 2, 2), 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ((1, 1, 8), 2, [(0, 1), (0, 1)]),
        ((1, 2, 4), 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_each_process_reads_the_rows_of_its_devices(monkeypatch, axes, processes, parts):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for index, part in enumerate(parts):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        assert share_of_batch(mesh_of(*axes, processes)) == part


def test_a_mesh_that_cuts_rows_between_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: 3)
    with pytest.raises(ValueError, match=r"data=3, fsdp=1, tensor=2 does not divide the batch evenly over 2 processes"):
        share_of_batch(mesh_of(3, 1, 2, 2))


# --- whole runs, with the command

CONFIG = """
from transformers_jax.data import TextData
from transformers_jax.experiment import Experiment
from transformers_jax.models import GPTConfig
from transformers_jax.tasks import LanguageModeling
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig

def experiment():
    return Experiment(
        task=LanguageModeling(length=8, sample_tokens=4),
        model=GPTConfig(vocab_size=None, max_length=16, dim=16, depth=2, heads=8, dropout=0.1),
        data=TextData(source={source!r}, tokenizer="character", cache_dir={cache!r}),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
        training=TrainingConfig(steps=16, batch_size=8, log_every=1, eval_every=8, checkpoint_every=4),
    )
"""

# Rows of unlike length, and 25 of them to evaluate, which no number of processes divides.
CLASSES = """
from transformers_jax.data import ClassificationData
from transformers_jax.experiment import Experiment
from transformers_jax.models import BertConfig
from transformers_jax.tasks import TextClassification
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.optimizer import OptimizerConfig

def experiment():
    return Experiment(
        task=TextClassification(length=32),
        model=BertConfig(vocab_size=None, max_length=32, dim=16, depth=2, heads=8),
        data=ClassificationData(source={source!r}, validation_fraction=0.25),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
        training=TrainingConfig(steps=8, batch_size=8, log_every=1, eval_every=8, checkpoint_every=8),
    )
"""


class Runs:
    """Starts the same training in any number of processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        words = np.random.default_rng(0).choice(["quiet", "hills", "and", "rivers", "run", "over", "jumps"], 700)
        (folder / "text.txt").write_text("\n".join(" ".join(line) for line in words.reshape(70, 10)))
        self.config = folder / "tiny.py"
        self.config.write_text(CONFIG.format(source=str(folder / "text.txt"), cache=str(folder / "cache")))
        rows = [f"{' '.join(line[: 1 + number % 9])},{line[0]}" for number, line in enumerate(words.reshape(70, 10))]
        (folder / "rows.csv").write_text("\n".join(["text,label", *rows, *rows[:30]]))
        self.classes = folder / "classes.py"
        self.classes.write_text(CLASSES.format(source=str(folder / "rows.csv")))

    def start(self, name, processes, devices, *arguments, of_each=lambda index: (), config=None):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
            "PYTHONPATH": str(REPOSITORY),
        }
        environment.pop("XLA_FLAGS", None)
        address = f"127.0.0.1:{free_port()}"
        started = []
        for index in range(processes):
            who = ["--distributed.coordinator", address, "--distributed.processes", str(processes)]
            command = [sys.executable, "-m", "transformers_jax.cli", "train", "--config", str(config or self.config)]
            command += ["--workdir", str(self.folder / name), *who, "--distributed.process", str(index), *arguments]
            with (self.folder / f"{name}.{index}").open("w") as output:
                started.append(
                    subprocess.Popen([*command, *of_each(index)], env=environment, stdout=output, stderr=output)
                )
        return started

    def finish(self, name, started, *, codes=None, timeout=240):
        try:
            for process in started:
                process.wait(timeout)
        finally:
            for process in started:
                process.kill()
        output = [(self.folder / f"{name}.{index}").read_text() for index in range(len(started))]
        assert [process.returncode for process in started] == (codes or [0] * len(started)), "\n".join(output)
        return output

    def run(self, name, processes, devices, *arguments, **options):
        codes = options.pop("codes", None)
        return self.finish(name, self.start(name, processes, devices, *arguments, **options), codes=codes)

    def lines(self, name):
        path = self.folder / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self, name):
        """(loss by step, evaluated loss by step)"""
        lines = self.lines(name)
        return tuple({line["step"]: line[key] for line in lines if key in line} for key in ("loss", "eval/loss"))

    def wait_for(self, started, reached, timeout=180):
        deadline = time.monotonic() + timeout
        while not reached():
            assert all(process.poll() is None for process in started), "ended too early"
            assert time.monotonic() < deadline, "does not begin"
            time.sleep(0.05)

    def steps(self, name):
        folder = self.folder / name / "checkpoints"
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit()) if folder.is_dir() else []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("runs"))
    runs.run("one", 1, 8)
    return runs


def close(runs, name, *, other="one", rtol=1e-5, steps=16):
    losses, evaluated = runs.losses(name)
    expected, expected_evaluated = runs.losses(other)
    assert list(losses) == list(expected) == list(range(1, steps + 1))
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=rtol)
    np.testing.assert_allclose(list(evaluated.values()), list(expected_evaluated.values()), rtol=rtol)


@pytest.mark.mesh
def test_two_processes_compute_what_one_computes_and_a_killed_one_is_missed(runs):
    output = runs.run("two", 2, 4)
    close(runs, "two")
    assert "devices         8 x cpu" in output[0]
    assert [line for line in output[1].splitlines() if not line.startswith("[Gloo]")] == []  # only one says anything
    assert runs.steps("two") == runs.steps("one")

    started = runs.start("killed", 2, 4)
    runs.wait_for(started, lambda: runs.steps("killed") and len(runs.lines("killed")) >= 6)
    begin = time.monotonic()
    started[1].kill()
    output = runs.finish("killed", started, codes=[1, -signal.SIGKILL])
    assert time.monotonic() - begin < NOTICED_IN
    assert output[0].splitlines()[-1].startswith("error: process 1 of 2 ended without a word (killed, ")
    assert "start the same command again to continue from step " in output[0]
    runs.run("killed", 2, 4)
    assert runs.losses("killed") == runs.losses("two")  # bit for bit


@pytest.mark.parametrize(
    ("processes", "devices", "settings"),
    [
        pytest.param(4, 1, ["--training.data-processes", "1"], marks=pytest.mark.mesh),
        pytest.param(2, 4, ["--mesh.fsdp", "4", "--mesh.tensor", "2"], marks=pytest.mark.exhaustive),
        # Both processes read all rows.
        pytest.param(2, 4, ["--mesh.data", "1", "--mesh.tensor", "8"], marks=pytest.mark.mesh),
    ],
)
def test_any_processes_and_any_mesh_compute_what_one_process_computes(runs, processes, devices, settings):
    name = f"{processes}{'-'.join(settings[:4])}"
    output = runs.run(name, processes, devices, *settings)
    close(runs, name)
    sample = (runs.folder / "one.0").read_text().splitlines()[-1]
    assert output[0].splitlines()[-1] == sample


@pytest.mark.mesh
def test_rows_of_an_evaluation_come_together(runs):
    """Accuracy and F1 are computed of all rows, of which each process has a part, the last batch not being full."""
    for name, processes, devices in (("rows-1", 1, 8), ("rows-2", 2, 4)):
        runs.run(name, processes, devices, config=runs.classes)
    close(runs, "rows-2", other="rows-1", steps=8)
    names = ("eval/accuracy", "eval/examples")
    one, two = ({name: runs.lines(run)[-1].get(name) for name in names} for run in ("rows-1", "rows-2"))
    assert one == two and one["eval/accuracy"] is not None

    # And from a checkpoint, with a head that only one of the two processes could make for itself.
    output = runs.run("from", 2, 4, "--initial-checkpoint", str(runs.folder / "rows-1"), "--task.new-head",
                      config=runs.classes)  # fmt: skip
    assert "new parameters, not in the checkpoint" in output[0] and "new parameters" not in output[1]
    runs.run("from-1", 1, 8, "--initial-checkpoint", str(runs.folder / "rows-1"), "--task.new-head",
             config=runs.classes)  # fmt: skip
    close(runs, "from", other="from-1", steps=8)


def stop_one(runs, name, processes, devices, *arguments, who, at):
    """Send SIGTERM to process `who` when step `at` is logged; the step at which all stopped."""
    started = runs.start(name, processes, devices, *arguments)
    runs.wait_for(started, lambda: runs.lines(name) and runs.lines(name)[-1]["step"] >= at)
    started[who].terminate()
    output = runs.finish(name, started, codes=[75] * processes if processes > 1 else [0])
    (line,) = [line for line in output[0].splitlines() if line.startswith("interrupted; step ")]
    step = int(line.split()[2])
    assert runs.steps(name)[-1] == step
    return step


@pytest.mark.mesh
def test_a_signal_to_one_stops_all_and_any_other_processes_continue(runs):
    first = stop_one(runs, "elastic", 2, 4, "--mesh.fsdp", "8", who=1, at=3)
    second = stop_one(runs, "elastic", 1, 8, who=0, at=first + 1)
    assert 3 <= first < second < 16
    runs.run("elastic", 2, 4, "--mesh.tensor", "2")
    close(runs, "elastic")


@pytest.mark.parametrize(
    ("who", "moment"),
    [
        pytest.param(
            who, moment, marks=pytest.mark.mesh if (who == 0) == (moment == "step") else pytest.mark.exhaustive
        )
        for who in (0, 1)
        for moment in ("step", "save", "start")
    ],
)
def test_a_killed_process_ends_the_other_at_any_moment(runs, who, moment):
    name = f"kill-{who}-{moment}"
    every = ["--training.checkpoint-every", "1" if moment == "save" else "1000", "--training.steps", "1000"]
    started = runs.start(name, 2, 1, *every)
    checkpoints = runs.folder / name / "checkpoints"
    reached = {
        "start": lambda: (runs.folder / name / ".lock").exists(),
        "step": lambda: len(runs.lines(name)) > 3,
        "save": lambda: len(runs.steps(name)) > 1 and any("tmp" in path.name for path in checkpoints.iterdir()),
    }
    runs.wait_for(started, reached[moment])
    begin = time.monotonic()
    started[who].kill()
    codes = [1, 1]
    codes[who] = -signal.SIGKILL
    output = runs.finish(name, started, codes=codes)[1 - who]
    assert time.monotonic() - begin < NOTICED_IN
    assert f"error: process {who} of 2 ended without a word (killed" in output
    assert "start the same command again to continue from" in output


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("arguments", "of_second", "message"),
    [
        ([], ["--data.source", "nowhere.txt"], "nowhere.txt"),
        (
            [],
            ["--training.steps", "20"],
            "processes 1 and 0 were started with different settings: training.steps is 20 and 16;",
        ),
        ([], ["--workdir", "elsewhere"], "process 1 of 2 does not see what process 0 writes into"),
        (["--training.batch-size", "6"], [], "batch_size=6 is not a multiple of 4 = data 4 x fsdp 1"),
        (["--mesh.data", "3"], [], "does not make the 4 devices there are"),
    ],
)
def test_a_mistake_ends_all_processes_with_its_message(runs, tmp_path, arguments, of_second, message):
    of_second = [str(tmp_path / "elsewhere") if argument == "elsewhere" else argument for argument in of_second]
    name = f"mistake{len(list(runs.folder.glob('mistake*')))}"
    output = runs.run(name, 2, 2, *arguments, of_each=lambda index: of_second if index else [], codes=[2, 2])
    for text in output:
        errors = [line for line in text.splitlines() if not line.startswith("[Gloo]")]
        assert len(errors) == 1 and message in errors[0], text


@pytest.mark.mesh
def test_several_seeds_in_two_processes_give_one_summary(runs):
    output = runs.run("seeds", 2, 4, "--seeds", "1", "2", "--training.steps", "4")
    summaries = [line for text in output for line in text.splitlines() if line.startswith('{"seeds"')]
    assert len(summaries) == 1 and len(json.loads(summaries[0])["eval/loss"]["values"]) == 2
