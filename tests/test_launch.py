"""The launch files and the page about them: each does what it says against stand-ins for SLURM, Kubernetes and Google
Cloud, and every command in them is one that the command line takes."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import tyro
import yaml

from transformers_jax import cli
from transformers_jax.training.distributed import DistributedConfig
from transformers_jax.training.mesh import MeshConfig

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "launch"
SHELL_FILES = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
PAGE = ROOT / "docs" / "running_on_many_devices.md"

# Takes the place of a program: writes down how it was called, and does what the program would do next.
STAND_IN = (
    f"#!{sys.executable}\n"
    + """
import json, os, signal, subprocess, sys, time
name, arguments, env = os.path.basename(sys.argv[0]), sys.argv[1:], os.environ
call = {"program": name, "arguments": arguments, "gpus": env.get("CUDA_VISIBLE_DEVICES")}
if name == "kubectl" and "apply" in arguments:
    call["manifest"] = sys.stdin.read()

def write():
    with open(env["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")

def run_all(commands):
    children = [subprocess.Popen(command, env=environment) for command, environment in commands]
    signal.signal(signal.SIGTERM, lambda *_: [child.send_signal(signal.SIGTERM) for child in children])
    sys.exit(max(child.wait() for child in children))

if name == "transformers-jax" and "STAND_IN_WAITS" in env:
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    write()
    deadline = time.monotonic() + 20
    while not stopped and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)  # saves
    call["saved"] = True
write()
if name == "sbatch":
    place = next(i for i, argument in enumerate(arguments) if argument.endswith(".sbatch"))
    os.execvp("bash", ["bash", *arguments[place:]])
if name == "srun":
    command = [argument for argument in arguments if not argument.startswith("--kill-on-bad-exit")]
    step = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2",
            "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    run_all([(command, env | step | {"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)}) for i in range(2)])
if name == "mpirun":
    start = arguments.index("transformers-jax")
    os.execvp(arguments[start], arguments[start:])
if name == "gcloud" and "describe" in arguments:
    with open(env["CALLS"]) as file:
        asked = sum("describe" in line for line in file)
    print(env["STATES"].split()[asked - 1])
sys.exit(int(env.get("STAND_IN_EXITS", "0")) if name == "transformers-jax" else 0)
"""
)
PROGRAMS = (
    *("transformers-jax", "sbatch", "srun", "scontrol", "mpirun"),
    *("kubectl", "docker", "gcloud", "pip", "xprof", "sudo", "nvidia-smi"),
)


class Tools:
    """Stand-ins on the PATH, and what they were called with."""

    def __init__(self, folder):
        self.folder = folder
        self.log = folder / "calls.jsonl"
        programs = folder / "bin"
        programs.mkdir()
        for name in PROGRAMS:
            (programs / name).write_text(STAND_IN)
            (programs / name).chmod(0o755)
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "JAX_"))},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(self.log),
            "VENV": "/nowhere",  # of slurm.sbatch: the stand-in is what there is
            "SLURM_JOB_ID": "4711",
            "SLURM_GPUS_ON_NODE": "8",
            "STATES": "WAITING_FOR_RESOURCES PROVISIONING ACTIVE",
            "POLL_SECONDS": "0",
        }

    def start(self, *command, cwd=ROOT, **env):
        return subprocess.Popen(
            [str(part) for part in command], cwd=cwd, env=self.env | env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *command, cwd=ROOT, code=0, **env):
        process = self.start(*command, cwd=cwd, **env)
        out, errors = process.communicate(timeout=240)
        assert process.returncode == code, (process.returncode, out, errors)
        return out if code == 0 else out + errors

    def calls(self, program):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [call for call in map(json.loads, lines) if call["program"] == program]

    def arguments(self, program):
        return [call["arguments"] for call in self.calls(program)]

    def wait_for(self, program, count):
        deadline = time.monotonic() + 20
        while len(self.calls(program)) < count:
            assert time.monotonic() < deadline, f"{program} was not called {count} times"
            time.sleep(0.02)


@pytest.fixture
def tools(tmp_path):
    return Tools(tmp_path)


class Parsed(BaseException):
    """The command line was understood: what it says."""


def parse(arguments):
    """The settings that our command line reads from `arguments`; it does nothing with them."""
    understood = tyro.cli

    def stop(*args, **kwargs):
        raise Parsed(understood(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tyro, "cli", stop)
        with pytest.raises(Parsed) as caught:
            assert cli._main(list(arguments)) == 0, f"transformers-jax {shlex.join(arguments)}"
    return caught.value.args[0]


def mesh(data, fsdp=1, tensor=1):
    return MeshConfig(data=data, fsdp=fsdp, tensor=tensor)


# --- the files themselves


@pytest.mark.parametrize("file", SHELL_FILES, ids=lambda file: file.name)
def test_shell_files_are_bash(file):
    assert os.access(file, os.X_OK)
    subprocess.run(["bash", "-n", file], check=True)


def test_shellcheck_finds_nothing():
    subprocess.run([Path(sys.executable).with_name("shellcheck"), "--severity", "warning", *SHELL_FILES], check=True)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("launch/jobset.sh gpu --config x", "set IMAGE to"),
        ("IMAGE=i launch/jobset.sh tpu --config x", "set CLAIM to"),
        ("IMAGE=i CLAIM=c launch/jobset.sh gpu", "--config NAME is missing"),
        ("launch/jobset.sh cpu", "usage: launch/jobset.sh gpu|tpu"),
        ("IMAGE=i CLAIM=c TOPOLOGY=2x3 launch/jobset.sh tpu --config x", "TOPOLOGY=2x3 has 6 chips, which CHIPS=4"),
        ("IMAGE=i CLAIM=c TOPOLOGY=big launch/jobset.sh tpu --config x", "TOPOLOGY=big is not like 4x4"),
        ("IMAGE=i CLAIM=c CHIPS=0 launch/jobset.sh tpu --config x", "CHIPS=0 is not a number above 0"),
        ("IMAGE=i CLAIM=c HOSTS=0 launch/jobset.sh gpu --config x", "HOSTS=0 is not a number above 0"),
        ("IMAGE=i CLAIM=c NAME=My_run launch/jobset.sh gpu --config x", "NAME=My_run is no name in Kubernetes"),
        ("launch/tpu_pod.sh create", "set TPU to"),
        ("TPU=t launch/tpu_pod.sh create", "set ZONE to"),
        ("TPU=t ZONE=z launch/tpu_pod.sh create", "set SHARE to"),
        ("TPU=t ZONE=z SHARE=s launch/tpu_pod.sh train", "--config NAME is missing"),
        ("TPU=t ZONE=z SHARE=s launch/tpu_pod.sh creat", "usage: launch/tpu_pod.sh create|install"),
        ("GPUS=0 launch/one_host.sh --config x", "GPUS=0 (unset: what nvidia-smi lists) must be the number"),
        ("GPUS=all launch/one_host.sh --config x", "GPUS=all (unset: what nvidia-smi lists) must be the number"),
    ],
)
def test_what_is_not_set_is_an_error_that_names_it(tools, command, message):
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, env=tools.env, capture_output=True, text=True)
    assert result.returncode in (1, 2, 127) and message in result.stderr, result.stderr
    assert not tools.log.exists()


# --- train.sh: an exit code that says whether it is done


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_that_of_the_training(tools, code):
    tools.run(LAUNCH / "train.sh", "--config", "x", "a b", code=code, STAND_IN_EXITS=str(code))
    assert tools.arguments("transformers-jax") == [["train", "--config", "x", "a b"]]


def test_a_training_that_was_stopped_has_saved_and_is_not_done(tools):
    process = tools.start(LAUNCH / "train.sh", "--config", "x", STAND_IN_WAITS="1")
    tools.wait_for("transformers-jax", 1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # impatient
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert tools.calls("transformers-jax")[-1]["saved"]


# --- SLURM


def test_a_job_gives_its_arguments_to_each_node(tools):
    tools.run(
        "sbatch", "--nodes", "2", "launch/slurm.sbatch", "--config", "gpt2_124m", "--mesh.data", "-1", "--seed", "3"
    )
    assert (
        tools.arguments("transformers-jax")
        == [["train", "--config", "gpt2_124m", "--mesh.data", "-1", "--seed", "3"]] * 2
    )
    assert tools.calls("scontrol") == []


def test_a_job_that_fails_is_not_started_again(tools):
    tools.run("sbatch", "launch/slurm.sbatch", "--config", "x", code=2, STAND_IN_EXITS="2")
    assert tools.calls("scontrol") == []


def test_a_job_whose_time_is_over_saves_and_goes_back_into_the_queue(tools):
    process = tools.start("bash", LAUNCH / "slurm.sbatch", "--config", "x", STAND_IN_WAITS="1")
    tools.wait_for("transformers-jax", 2)
    process.send_signal(signal.SIGTERM)  # to the batch shell alone, as --signal=B:TERM does
    process.communicate(timeout=30)
    assert [call.get("saved") for call in tools.calls("transformers-jax")] == [None, None, True, True]
    assert tools.arguments("scontrol") == [["requeue", "4711"]]


def test_a_job_of_which_slurm_stops_the_processes_goes_back_into_the_queue(tools):
    tools.run("bash", LAUNCH / "slurm.sbatch", "--config", "x", code=75, STAND_IN_EXITS="75")
    assert tools.arguments("scontrol") == [["requeue", "4711"]]


def test_the_job_asks_for_a_signal_in_time_and_to_be_started_again():
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert len(options) == len(re.findall("^#SBATCH", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE))
    options = dict(options)
    assert {"requeue", "open-mode", "nodes", "gpus-per-node", "time"} <= set(options)
    assert options["signal"] == "B:TERM@180" and options["ntasks-per-node"] == "1"


# --- trainings that really run, in two processes with two simulated devices each


@pytest.fixture
def real(tools):
    """The true command on the CPU, and arguments that make it a matter of seconds."""
    command = tools.folder / "bin" / "transformers-jax"
    command.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m transformers_jax.cli "$@"\n')
    tools.env |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "PYTHONPATH": str(ROOT),
    }
    (tools.folder / "text.txt").write_text("".join(f"{i} plus {i} is {2 * i}.\n" for i in range(300)))
    return [
        *("--config", "gpt_python_docs", "--workdir", str(tools.folder / "run")),
        *("--data.source", str(tools.folder / "text.txt"), "--data.tokenizer", "character"),
        *("--data.cache-dir", str(tools.folder / "cache"), "--task.sample-tokens", "0"),
        *("--model.dim", "16", "--model.depth", "1", "--model.heads", "2", "--model.max-length", "16"),
        *("--model.unroll", "1", "--training.batch-size", "8", "--training.steps", "2", "--training.log-every", "1"),
        *("--mesh.data", "2", "--mesh.fsdp", "2"),
    ]


def free_port(low, high):
    """One in this range that nobody uses."""
    for port in range(low + os.getpid() % 97, high, 97):
        with socket.socket() as found:
            try:
                found.bind(("", port))
                return port
            except OSError:
                continue
    raise AssertionError("no port is free")


def trained(folder):
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert any("eval/loss" in line for line in lines)
    assert all(
        line["tokens_per_second_per_device"] == line["tokens_per_second"] / 4 for line in lines if "loss" in line
    )
    return True


def test_a_job_of_two_nodes_trains(tools, real):
    port = free_port(61440, 65535)  # JAX takes the coordinator's from the number of the job
    out = tools.run("bash", LAUNCH / "slurm.sbatch", *real, SLURM_JOB_ID=str(port - 61440))
    assert "4 x cpu" in out and out.count("devices") == 1 and trained(tools.folder)


@pytest.mark.mesh
def test_one_host_with_two_processes_trains(tools, real):
    port = free_port(20000, 30000)
    out = tools.run(LAUNCH / "one_host.sh", *real, GPUS="2", PORT=str(port))
    assert "4 x cpu" in out and out.count("devices") == 1 and trained(tools.folder)


@pytest.mark.mesh
def test_the_containers_of_two_hosts_train(tools, real):
    *_, container = jobset(tools, "gpu", *real, HOSTS="2")
    port = free_port(20000, 30000)
    name = "gpt2-hosts-0-0.gpt2:12355"  # which only the cluster knows
    hosts = []
    for number in ("0", "1"):
        arguments = as_started(container, {INDEX: number})
        assert arguments.count(name) == 1
        arguments = [f"127.0.0.1:{port}" if argument == name else argument for argument in arguments]
        hosts.append(tools.start(*container["command"], *arguments))
    outputs = [host.communicate(timeout=240) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "4 x cpu" in outputs[0][0] and "devices" not in outputs[1][0] and trained(tools.folder)


@pytest.mark.mesh
def test_a_job_that_is_stopped_saves_and_goes_on_when_it_is_started_again(tools, real):
    tools.env["SLURM_JOB_ID"] = number = str(free_port(61440, 65535) - 61440)
    job = tools.start("bash", LAUNCH / "slurm.sbatch", *real, "--training.steps", "100000")
    log = tools.folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (log.exists() and log.read_text().count('"loss"') >= 3):
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    out, errors = job.communicate(timeout=120)
    saved = int(re.search(r"interrupted; step (\d+) is saved", out)[1])
    assert tools.arguments("scontrol") == [["requeue", number]], errors
    out = tools.run("bash", LAUNCH / "slurm.sbatch", *real, "--training.steps", str(saved + 2))
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines() if '"loss"' in line]
    assert f"continues from step {saved}" in out and steps == list(range(1, saved + 3))


# --- one host


def test_each_process_of_one_host_has_its_gpu_and_knows_its_number(tools):
    tools.run(LAUNCH / "one_host.sh", "--config", "gpt2_124m", "--mesh.data", "3", GPUS="3", PORT="4000")
    calls = sorted(tools.calls("transformers-jax"), key=lambda call: call["gpus"])
    assert [call["gpus"] for call in calls] == ["0", "1", "2"]
    for number, call in enumerate(calls):
        command = parse(call["arguments"])
        assert command.experiment.mesh == mesh(3)
        assert command.distributed == DistributedConfig("127.0.0.1:4000", 3, number)


def test_one_host_stops_all_its_processes_and_fails_with_any(tools):
    process = tools.start(LAUNCH / "one_host.sh", "--config", "x", GPUS="2", STAND_IN_WAITS="1")
    tools.wait_for("transformers-jax", 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert [call.get("saved") for call in tools.calls("transformers-jax")] == [None, None, True, True]
    tools.run(LAUNCH / "one_host.sh", "--config", "x", code=1, GPUS="2", STAND_IN_EXITS="1")


# --- Kubernetes

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

# The fields of JobSet v1alpha2, of Jobs and of pods that these files use; the API server refuses others.
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "metadata": {"name", "annotations"},
    "spec": {"failurePolicy", "network", "replicatedJobs"},
    "spec.failurePolicy": {"maxRestarts", "rules"},
    "spec.failurePolicy.rules": {"action", "onJobFailureReasons"},
    "spec.network": {"enableDNSHostnames", "subdomain"},
    "spec.replicatedJobs": {"name", "replicas", "template"},
    "spec.replicatedJobs.template": {"spec"},
    "spec.replicatedJobs.template.spec": {
        *("completionMode", "completions", "parallelism", "backoffLimit", "podFailurePolicy", "template"),
    },
    "spec.replicatedJobs.template.spec.podFailurePolicy": {"rules"},
    "spec.replicatedJobs.template.spec.podFailurePolicy.rules": {"action", "onExitCodes"},
    "spec.replicatedJobs.template.spec.template": {"spec"},
    "spec.replicatedJobs.template.spec.template.spec": {
        *("restartPolicy", "terminationGracePeriodSeconds", "nodeSelector", "containers", "tolerations", "volumes"),
    },
    "spec.replicatedJobs.template.spec.template.spec.containers": {
        *("name", "image", "command", "args", "env", "ports", "resources", "volumeMounts"),
    },
    "spec.replicatedJobs.template.spec.template.spec.volumes": {"name", "persistentVolumeClaim", "emptyDir"},
}


def check_fields(value, path=""):
    if isinstance(value, list):
        for item in value:
            check_fields(item, path)
    elif path in FIELDS:
        assert set(value) <= FIELDS[path], path
        for name, inner in value.items():
            check_fields(inner, f"{path}.{name}".strip("."))


def jobset(tools, kind, *arguments, **env):
    """The manifest, its Job, its pod and its container, after the checks that hold for both kinds."""
    settings = {"IMAGE": "registry.example.com/a:b", "CLAIM": "runs", "NAME": "gpt2"} | env
    text = tools.run(LAUNCH / "jobset.sh", kind, *arguments, **settings)
    assert "${" not in text
    manifest = yaml.safe_load(text)
    check_fields(manifest)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name = manifest["metadata"]["name"]
    assert name == settings["NAME"]
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert replicated["replicas"] == 1 and job["completionMode"] == "Indexed"  # else pods have no number
    assert isinstance(job["completions"], int) and job["completions"] == job["parallelism"]
    assert job["backoffLimit"] == 0  # a process alone cannot be started again
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 120
    (container,) = pod["containers"]
    # It is started again, but not with a mistake, which our command line says by exit code 2.
    (rule,) = job["podFailurePolicy"]["rules"]
    mistakes = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert rule == {"action": "FailJob", "onExitCodes": mistakes}
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    assert policy["rules"] == [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    assert container["image"] == settings["IMAGE"] and container["command"] == ["launch/train.sh"]
    assert all(isinstance(argument, str) for argument in container["args"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    # The longest name of a pod that a Job makes is a DNS label.
    assert len(f"{name}-{replicated['name']}-0-{job['completions'] - 1}-abcde") <= 63
    return manifest, job, pod, container


def as_started(container, fields):
    """The arguments a container gets, by Kubernetes' rules for $(NAME) and $$."""
    values = {}
    for variable in container.get("env", ()):
        values[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]

    def fill(match):
        return "$" if match[0] == "$$" else values[match[1]]

    return [re.sub(r"\$\$|\$\((\w+)\)", fill, argument) for argument in container["args"]]


def test_hosts_with_gpus_find_the_first_of_them(tools):
    arguments = ["--config", "gpt2_124m", "--mesh.data", "2", "--mesh.fsdp", "4"]
    manifest, job, _, container = jobset(tools, "gpu", *arguments, HOSTS="2", GPUS="4")
    assert job["completions"] == 2 and container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    # JobSet: pods are reached at JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN.
    network, (replicated,) = manifest["spec"]["network"], manifest["spec"]["replicatedJobs"]
    assert network["enableDNSHostnames"] is True
    host = f"{manifest['metadata']['name']}-{replicated['name']}-0-0.{network['subdomain']}"
    for number in range(2):
        command = parse(["train", *as_started(container, {INDEX: str(number)})])
        assert command.distributed == DistributedConfig(f"{host}:12355", 2, number)
        assert command.workdir == "/runs/gpt2" and command.config == "gpt2_124m"
        assert command.experiment.mesh == mesh(2, 4)
    assert {"containerPort": 12355} in container["ports"]


def test_hosts_of_a_tpu_slice_are_as_many_as_its_chips_need(tools):
    arguments = ["--config", "gpt2_124m", "--mesh.data", "-1", "--workdir", "/runs/other"]
    settings = {"ACCELERATOR": "tpu-v5p-slice", "TOPOLOGY": "2x2x4", "CHIPS": "4"}
    manifest, job, pod, container = jobset(tools, "tpu", *arguments, **settings)
    assert job["completions"] == 4 and container["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "gpt2"}
    command = parse(["train", *as_started(container, {})])
    assert command.distributed == DistributedConfig()  # GKE says what is needed
    assert command.workdir == "/runs/other"


def test_arguments_reach_the_container_as_they_are(tools):
    odd = ["--config", 'a "b"\\c', "$(HOME) $HOME", "x: [y], # z & ${HOSTS}", "é\nè"]
    text = tools.run(LAUNCH / "jobset.sh", "gpu", *odd, IMAGE="i", CLAIM="c")
    (replicated,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert as_started(container, {INDEX: "0"})[2:7] == odd


def test_the_image_has_what_the_jobs_start():
    lines = (LAUNCH / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    allowed = {line[1:] for line in (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    sources = {source for *sources, _ in copied for source in sources}
    assert sources == allowed and all((ROOT / source).exists() for source in sources)
    assert ["launch", "launch"] in copied and "WORKDIR /app" in lines  # where `launch/train.sh` is looked for
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', project, re.MULTILINE)
    assert len(needed) == 2 and {*needed, "transformers_jax", "configs"} <= sources
    (install,) = (re.search(r'pip install "\.\[(.+)\]"', line) for line in lines if line.startswith("RUN "))
    for extra in install[1].replace("${EXTRA}", "cuda,tpu").split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


# --- Cloud TPU


def tpu_pod(tools, *arguments, **env):
    settings = {"TPU": "my-slice", "ZONE": "us-west4-a", "SHARE": "10.0.0.2:/runs"} | env
    tools.log.unlink(missing_ok=True)
    tools.run(LAUNCH / "tpu_pod.sh", *arguments, **settings)
    calls = tools.arguments("gcloud")
    assert all(call[:2] == ["compute", "tpus"] and call[call.index("--zone") + 1] == "us-west4-a" for call in calls)
    return [call[2:] for call in calls]


def test_slices_are_made_and_removed_as_they_were_asked_for(tools):
    (create,) = tpu_pod(tools, "create", TYPE="v5litepod-32")
    assert create[:3] == ["tpu-vm", "create", "my-slice"]
    assert create[create.index("--accelerator-type") + 1] == "v5litepod-32" and "--version" in create
    assert tpu_pod(tools, "delete")[0][:3] == ["tpu-vm", "delete", "my-slice"]
    create, *asked = tpu_pod(tools, "create", SPOT="1")
    assert create[:3] == ["queued-resources", "create", "my-slice"] and "--spot" in create
    assert create[create.index("--node-id") + 1] == "my-slice" and "--runtime-version" in create
    assert len(asked) == 3 and asked[0][:3] == ["queued-resources", "describe", "my-slice"]
    assert tpu_pod(tools, "delete", SPOT="1")[0][:3] == ["queued-resources", "delete", "my-slice"]


def test_a_queue_that_gives_nothing_is_a_failure(tools):
    env = {"TPU": "t", "ZONE": "z", "SHARE": "s", "SPOT": "1", "STATES": "WAITING_FOR_RESOURCES FAILED"}
    assert "t is FAILED" in tools.run(LAUNCH / "tpu_pod.sh", "create", code=1, **env)


def remote(tools, call, home):
    """Run what gcloud was told to run on all hosts, in the home of one of them."""
    assert call[:3] == ["tpu-vm", "ssh", "my-slice"] and call[call.index("--worker") + 1] == "all"
    home.mkdir(exist_ok=True)
    tools.run("bash", "-c", call[call.index("--command") + 1], cwd=home)


def test_every_host_of_a_slice_starts_the_training_and_stops_it(tools, tmp_path):
    home = tmp_path / "home"
    (home / "transformers_jax").mkdir(parents=True)
    (call,) = tpu_pod(
        tools, "train", "--config", "gpt2_124m", "--data.source", "/mnt/runs/my text/*.jsonl", "--mesh.data", "-1"
    )
    remote(tools, call, home)
    tools.wait_for("transformers-jax", 1)
    (arguments,) = tools.arguments("transformers-jax")
    command = parse(arguments)
    assert command.workdir == "/mnt/runs/my-slice" and command.distributed == DistributedConfig()
    assert command.experiment.data.source == "/mnt/runs/my text/*.jsonl" and command.experiment.mesh == mesh(-1)
    assert (home / "train.log").exists()
    (call,) = tpu_pod(tools, "stop")
    assert call[call.index("--worker") + 1] == "all" and "pkill -TERM" in call[-1]
    (call,) = tpu_pod(tools, "log")
    assert call[call.index("--worker") + 1] == "0" and "train.log" in call[-1]


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="what is installed on the hosts is a commit of this repository"
)
def test_every_host_of_a_slice_gets_the_repository(tools):
    copy, install = tpu_pod(tools, "install")
    assert copy[:2] == ["tpu-vm", "scp"] and copy[3] == "my-slice:transformers_jax.tar.gz"
    assert copy[copy.index("--worker") + 1] == install[install.index("--worker") + 1] == "all"
    script = install[install.index("--command") + 1]
    subprocess.run(["bash", "-n", "-c", script], check=True)
    assert ".[tpu,hub,metrics]" in script and "mount -t nfs '10.0.0.2:/runs' /mnt/runs" in script


# --- the page


def blocks():
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_every_command_of_the_page_runs_and_its_options_exist(tools):
    assert len(blocks()) >= 10
    tools.run("bash", "-euo", "pipefail", "-c", "\n".join(blocks()))
    trainings = tools.arguments("transformers-jax")
    for call in tools.calls("kubectl"):
        if "manifest" in call:
            (replicated,) = yaml.safe_load(call["manifest"])["spec"]["replicatedJobs"]
            (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
            trainings.append(["train", *as_started(container, {INDEX: "0"})])
    for call in tools.arguments("gcloud"):
        if "ssh" in call and "transformers-jax train --" in (script := call[call.index("--command") + 1]):
            trainings.append(shlex.split(re.search(r"transformers-jax (train .*?) >", script)[1]))
    # Seven plain ones and a plan, eight processes of one host, two of SLURM, two JobSets, a slice, one of mpirun.
    assert len(trainings) == 22
    for arguments in trainings:
        assert parse(arguments).config in ("gpt2_124m", "gpt_python_docs")


def test_every_setting_of_the_page_exists():
    named = set(re.findall(r"--((?:training|mesh|model|optimizer|distributed|data)\.[a-z-]+)", PAGE.read_text()))
    assert len(named) > 15
    command = parse(["train", "--config", "gpt2_124m"])
    for name in named:
        part, field = name.replace("-", "_").split(".")
        holder = command if part == "distributed" else command.experiment
        assert hasattr(getattr(holder, part), field), name


def test_every_file_of_the_page_exists_and_none_is_left_out():
    text = PAGE.read_text()
    linked = {path for path in re.findall(r"\]\(([^):]+)\)", text)}
    assert all((PAGE.parent / path).exists() for path in linked)
    for file in LAUNCH.iterdir():
        assert file.name in text or file.name in ("train.sh", "Dockerfile.dockerignore"), file.name
