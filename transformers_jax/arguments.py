"""Command lines read into dataclasses by tyro, with errors of one line."""

import contextlib
import dataclasses
import io
import re
from typing import Any

import tyro

from transformers_jax.experiment import Experiment, load_config


def parse(command: Any, arguments: list[str], name: str, default: Any = tyro.MISSING_NONPROP) -> Any:
    """Read `arguments` into `command`; tyro's boxed errors become one line."""
    program = f"transformers-jax {name}"
    if wants_help(arguments):
        return tyro.cli(command, args=arguments, prog=program, default=default)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            return tyro.cli(command, args=arguments, prog=program, default=default)
    except SystemExit:
        # A title (in the edge of a box, or with a rule below it), the message, a rule, and where to find help.
        sections = re.split(r"(?m)^[│ ]*[─-]{4,}[│ ]*$|^╭.*╮$", printed.getvalue())
        message = " ".join(sections[1].replace("│", "").split())
        message = message.partition(". Got errors:")[0]  # why each of the types that a value may have is not its type
        raise ValueError(f"{message} (transformers-jax {name} --help shows the options)") from None


def experiment_named(arguments: list[str], name: str) -> tuple[str, Experiment]:
    """The config that the arguments of the command `name` name, and its experiment before they change it."""
    config = option(arguments, "--config")
    if config is None:
        if not wants_help(arguments):
            raise ValueError(f"{name} needs --config FILE; configs/ has some, and `{name} --help` shows the options")
        config = "gpt_python_docs"
    experiment = load_config(config)
    if option(arguments, "--training.steps") is not None and option(arguments, "--training.epochs") is None:
        # What is named on the command line wins over what the config says.
        experiment = dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, epochs=None))
    return config, experiment


def wants_help(arguments: list[str]) -> bool:
    """Whether the arguments ask for help."""
    return "--help" in arguments or "-h" in arguments


def option(arguments: list[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE`, before the arguments can be parsed as a whole."""
    for i, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and i + 1 < len(arguments):
            return arguments[i + 1]
    return None
