"""The command `transformers-jax`, of which each subcommand is a function in COMMANDS."""

import ast
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, track

from transformers_jax.arguments import experiment_named, parse, wants_help
from transformers_jax.experiment import Experiment
from transformers_jax.inputs import read_inputs, read_text_lines
from transformers_jax.loading import Loaded, evaluate, load
from transformers_jax.patterns import patterns_command
from transformers_jax.pictures import draw_command, probe_command
from transformers_jax.planning.command import plan_command
from transformers_jax.running import run, run_seeds
from transformers_jax.tasks import LanguageModeling, PixelModeling, Translation
from transformers_jax.training.distributed import DistributedConfig, LostProcessError, launched, together
from transformers_jax.training.loop import TrainingDivergedError
from transformers_jax.training.process import prepare_process

Which = Literal["best", "latest"]


@dataclasses.dataclass(frozen=True)
class Train:
    """Train the model of a config, or continue a training that was interrupted (the same command does both).

    Every field of the config can be changed from here: --training.steps 500 --model.depth 6 --data.source my.txt
    """

    config: str
    """A config file (configs/*.py), or the name of one that comes with the package."""
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    workdir: str | None = None
    """Where the run lives: checkpoints, metrics.jsonl, tokenizer. Unset: runs/NAME of the config."""
    seeds: tuple[int, ...] = ()
    """Train once with each of these seeds, in WORKDIR/seed-N, and print mean and standard deviation of the metrics."""
    distributed: DistributedConfig = DistributedConfig()
    """Of a run in many processes: each is started with the same command, and knows its number."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Score a checkpoint on held-out data; prints its metrics as one line of JSON."""

    checkpoint: str
    """A run's working directory, or a Hugging Face checkpoint."""
    data: str | None = None
    """What to score, all of it: a file, a glob, tfds:NAME ... in a form that the checkpoint's task reads. Unset: what
    the run held out."""
    target: str | None = None
    """The file of translations whose lines belong to those of --data."""
    columns: tuple[str, ...] = ()
    """Which columns of it to read, if not those of the run: text=sentence label=stars, or numbers, text=0 label=1, for
    a table without header. There are text, pair, label, word, tag, source, target."""
    skip_bad: bool = False
    """Leave out examples that are broken, and say how many."""
    settings: tuple[str, ...] = ()
    """Settings of the task other than the checkpoint's: no_answer=True length=256."""
    report: str | None = None
    """A directory to write into: predictions, the confusion matrix, a sheet of the most confident mistakes (of image
    classifiers)."""
    batch_size: int = 8
    """Examples at a time."""
    which: Which = "best"
    """Which checkpoint of a run: the one with the best evaluation, or the latest."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class Predict:
    """What a model says of new inputs: classes with probabilities, entities with their places, answers with scores,
    masked words, embeddings. Prints one line of JSON for each input."""

    checkpoint: str
    """A run's working directory, or a Hugging Face checkpoint."""
    input: str
    """A file of inputs, or - for standard input: one text a line, or one JSON value a line (.jsonl, and lines that
    begin with a brace): {"text": ..., "pair": ...}, {"words": [...]}, {"question": ..., "context": ...}; or a table
    (.csv, .tsv, .parquet, .json) with these as columns. Of pictures: one, a directory of them, or a file that lists
    their paths (a relative one starts where that file is)."""
    output: str = "-"
    """The file to write; - is standard output."""
    skip_bad: bool = False
    """Leave out inputs that are empty or broken, and say how many. Otherwise the first one is an error."""
    settings: tuple[str, ...] = ()
    """Settings of the task other than the checkpoint's: no_answer=True length=256."""
    batch_size: int = 32
    """Inputs at a time."""
    which: Which = "best"
    """Which checkpoint of a run: the one with the best evaluation, or the latest."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type to compute in. Unset: the checkpoint's."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class Generate:
    """Write text that continues a prompt, as it comes."""

    checkpoint: str
    """A run's working directory, or a Hugging Face checkpoint."""
    prompt: str
    """The text to continue; - reads it from standard input. One that begins with a dash: --prompt=TEXT."""
    max_new_tokens: int | None = None
    """Most tokens to write. Unset: 200, or what the model has room for after the prompt."""
    min_new_tokens: int = 0
    """Fewest tokens before the text may end."""
    temperature: float = 0.8
    """Below 1: more likely words; above 1: more daring ones; 0: always the likeliest."""
    top_k: int | None = None
    """Choose among this many likeliest tokens only."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that occurred before become less likely."""
    no_repeat_ngram_size: int | None = None
    """No sequence of this many tokens occurs twice."""
    beams: int = 1
    """Above 1: beam search with this many beams, instead of sampling."""
    length_penalty: float = 1.0
    """Beam search divides a text's log-probability by its length to this power."""
    samples: int = 1
    """How many texts to write (with beams: the best ones)."""
    seed: int = 0
    """The same seed writes the same text."""
    which: Which = "best"
    """Which checkpoint of a run: the one with the best evaluation, or the latest."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type to compute in. Unset: the checkpoint's."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class Translate:
    """Translate text, line by line: each line of the input gives one of the output, an empty one an empty one."""

    checkpoint: str
    """A run's working directory, or a Hugging Face checkpoint (Marian, T5)."""
    input: str = "-"
    """The file to translate, one sentence a line; - is standard input."""
    output: str = "-"
    """The file to write; - is standard output."""
    beams: int = 4
    """Beams of the search; 1 takes the likeliest token at each step."""
    n_best: int | None = None
    """Write so many translations of each line, best first, as 'NUMBER ||| TRANSLATION ||| SCORE', the first line being
    0. Unset: the best alone, without more."""
    length_penalty: float | None = None
    """A translation's score is its log-probability divided by its length to this power. Unset: the checkpoint's."""
    prefix: str | None = None
    """What every source begins with: 'translate English to German: ' for T5, '>>fra<< ' for a Marian of several
    languages. Unset: what the model was trained with."""
    batch_size: int = 32
    """Sentences at a time; of 16 times as many those of like length go together. From a terminal, each line is
    translated at once."""
    which: Which = "best"
    """Which checkpoint of a run: the one with the best evaluation, or the latest."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type to compute in. Unset: the checkpoint's."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a run's model and tokenizer in the Hugging Face layout, which transformers reads."""

    checkpoint: str
    """A run's working directory, or a Hugging Face checkpoint."""
    output: str
    """The directory to write; a Hugging Face checkpoint that is already there is replaced."""
    which: Which = "best"
    """Which checkpoint of a run: the one with the best evaluation, or the latest."""
    debug: bool = False
    """Show the whole traceback of an error."""


def train_command(arguments: list[str]) -> int:
    name, experiment = experiment_named(arguments, "train")
    default = Train(config=name, experiment=experiment)
    command = parse(Train, arguments, "train", default)
    workdir = command.workdir or Path("runs") / Path(name).stem
    with together(command.distributed, exit_code=_exit_code):
        if jax.process_index() > 0:
            logging.getLogger().setLevel(logging.ERROR)  # process 0 says it for all
        if command.seeds:
            summary = run_seeds(command.experiment, workdir, command.seeds)
            if jax.process_index() == 0:
                print(json.dumps(summary))
            return 0
        result, many = run(command.experiment, workdir), jax.process_count() > 1
        if result.sample:
            print(result.sample)
    # Of several processes only one may have had a signal; whoever started the others must know that they are not done.
    return INTERRUPTED if result.ended == "interrupted" and many else 0


def evaluate_command(arguments: list[str]) -> int:
    command = parse(Evaluate, arguments, "evaluate")
    loaded = load(command.checkpoint, which=command.which, settings=_settings(command.settings))
    data = None
    if command.data is not None:
        changes: dict[str, Any] = {"source": command.data, "validation_source": command.data}
        if loaded.task.data is None:
            raise ValueError(f"{command.checkpoint} holds a model without a head, which can only predict (embeddings)")
        kind = loaded.task.data if loaded.experiment is None else loaded.experiment.data
        fields = {field.name for field in dataclasses.fields(kind)}
        for setting in command.columns:
            name, equals, column = setting.partition("=")
            if not equals or f"{name}_column" not in fields:
                known = ", ".join(field.removesuffix("_column") for field in fields if field.endswith("_column"))
                raise ValueError(f"--columns {setting} is not NAME=COLUMN; this task reads {known or 'none'}")
            changes[f"{name}_column"] = column
        if {"target", "validation_target"} <= fields:
            changes |= {"target": command.target, "validation_target": command.target}
        elif command.target is not None:
            raise ValueError(f"--target {command.target} is for translation; {command.checkpoint} does something else")
        if command.skip_bad:
            changes["skip_bad"] = True
        data = loaded.task.data(**changes) if isinstance(kind, type) else dataclasses.replace(kind, **changes)
    elif command.columns or command.skip_bad or command.target is not None:
        raise ValueError("--target, --columns and --skip-bad describe --data, which is not given")
    metrics = evaluate(loaded, data, batch_size=command.batch_size, report=command.report)
    rule = loaded.task.scoring_rule()
    about = {"checkpoint": command.checkpoint, "step": loaded.step} | ({} if rule is None else {"scoring": rule})
    metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    print(json.dumps(about | metrics))
    return 0


def predict_command(arguments: list[str]) -> int:
    command = parse(Predict, arguments, "predict")
    if command.batch_size < 1:
        raise ValueError(f"--batch-size {command.batch_size} must be at least 1")
    loaded = load(command.checkpoint, which=command.which, dtype=command.dtype, settings=_settings(command.settings))
    inputs = read_inputs(loaded, command.input, skip_bad=command.skip_bad)
    if command.output != "-" and not Path(command.output).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no directory {Path(command.output).absolute().parent} to write to")
    part = 32 * command.batch_size  # predicted and written before the next is begun
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        output = None
        for start in track(range(0, len(inputs), part), "predicting", console=console, disable=not console.is_terminal):
            predictions = loaded.predict(inputs[start : start + part], batch_size=command.batch_size)
            if output is None:  # not before there is something to write: a file that was there is lost
                output = sys.stdout
                if command.output != "-":
                    output = stack.enter_context(Path(command.output).open("w", encoding="utf-8"))
            for prediction in predictions:
                print(json.dumps(prediction, ensure_ascii=False), file=output)
            output.flush()
    return 0


def translate_command(arguments: list[str]) -> int:
    command = parse(Translate, arguments, "translate")
    if command.batch_size < 1:
        raise ValueError(f"--batch-size {command.batch_size} must be at least 1")
    if command.beams < 1 or not 1 <= (command.n_best or 1) <= command.beams:
        raise ValueError(f"--n-best {command.n_best or 1} must be between 1 and --beams {command.beams}")
    settings = {"beams": command.beams, "n_best": command.n_best or 1}
    settings |= {
        name: getattr(command, name) for name in ("length_penalty", "prefix") if getattr(command, name) is not None
    }
    loaded = load(command.checkpoint, which=command.which, dtype=command.dtype)
    if not isinstance(loaded.task, Translation):
        raise ValueError(
            f"{command.checkpoint} holds a {type(loaded.model).__name__}, which does not translate; "
            "`predict` shows what it does"
        )
    loaded = dataclasses.replace(loaded, task=dataclasses.replace(loaded.task, **settings))
    interactive = command.input == "-" and sys.stdin.isatty()
    part = 1 if interactive else 16 * command.batch_size
    console, number, cut = Console(stderr=True), 0, 0
    with contextlib.ExitStack() as stack:
        lines, output = iter(read_text_lines(command.input)), None
        show = console.is_terminal and not interactive and command.output != "-"
        with Progress(
            TextColumn("translating"),
            TextColumn("{task.completed:,.0f} sentences"),
            TimeElapsedColumn(),
            console=console,
            disable=not show,
        ) as progress:
            bar = progress.add_task("", total=None)
            while texts := list(itertools.islice(lines, part)):
                full = [text for text in texts if text.strip()]
                found = iter(loaded.predict(full, batch_size=min(command.batch_size, part)))
                if output is None:  # not before there is something to write: a file that was there is lost
                    output = sys.stdout
                    if command.output != "-":
                        output = stack.enter_context(Path(command.output).open("w", encoding="utf-8"))
                for text in texts:
                    prediction = next(found) if text.strip() else {"translation": "", "score": 0.0}
                    cut += "cut" in prediction
                    if command.n_best is None:
                        print(_one_line(prediction["translation"]), file=output)
                    else:
                        for one in prediction.get("translations", [prediction]):
                            print(f"{number} ||| {_one_line(one['translation'])} ||| {one['score']:.4f}", file=output)
                    number += 1
                output.flush()
                progress.update(bar, advance=len(texts))
    if cut:
        print(f"{cut:,} of {number:,} lines are longer than the model reads and were cut", file=sys.stderr)
    return 0


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def generate_command(arguments: list[str]) -> int:
    from transformers_jax.generation import Sampling, beam_search, stream

    command = parse(Generate, arguments, "generate")
    for name in ("samples", "beams"):
        if getattr(command, name) < 1:
            raise ValueError(f"--{name} {getattr(command, name)} must be at least 1")
    sampling = Sampling(
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        repetition_penalty=command.repetition_penalty,
        no_repeat_ngram_size=command.no_repeat_ngram_size,
        min_new_tokens=command.min_new_tokens,
    )
    loaded = load(command.checkpoint, which=command.which, dtype=command.dtype)
    if not isinstance(loaded.task, LanguageModeling):
        more = "`draw` makes its pictures" if isinstance(loaded.task, PixelModeling) else "`predict` shows what it does"
        raise ValueError(
            f"{command.checkpoint} holds a {type(loaded.model).__name__}, which does not write text; {more}"
        )
    tokenizer, limit = loaded.processor, loaded.model.config.max_length
    prompt = sys.stdin.read() if command.prompt == "-" else command.prompt
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError("the prompt is not valid UTF-8")
    ids = tokenizer.encode(prompt)
    if not ids:
        if tokenizer.eos_id is None:
            raise ValueError("the prompt is empty, and this tokenizer has no token to begin a text with")
        ids = [tokenizer.eos_id]
    stop_ids = _stop_ids(loaded)
    new_tokens = max(1, min(200, limit - len(ids))) if command.max_new_tokens is None else command.max_new_tokens
    rows = np.asarray([ids], np.int32)

    if command.beams > 1:
        found = beam_search(
            loaded.model,
            rows,
            beams=command.beams,
            max_new_tokens=new_tokens,
            num_return_sequences=command.samples,
            length_penalty=command.length_penalty,
            repetition_penalty=command.repetition_penalty,
            no_repeat_ngram_size=command.no_repeat_ngram_size,
            min_new_tokens=command.min_new_tokens,
            stop_ids=stop_ids,
        )
        for tokens, length in zip(found.tokens[0], found.lengths[0], strict=True):
            print(prompt + tokenizer.decode([token for token in tokens[:length].tolist() if token not in stop_ids]))
        return 0
    for number in range(command.samples):
        key = jax.random.fold_in(jax.random.key(command.seed), number)
        text = tokenizer.stream()
        steps = stream(loaded.model, rows, max_new_tokens=new_tokens, sampling=sampling, stop_ids=stop_ids, key=key)
        print(prompt, end="", flush=True)
        for tokens in steps:
            if int(tokens[0]) not in stop_ids:
                print(text.push(int(tokens[0])), end="", flush=True)
        print(text.finish())
    return 0


def convert_command(arguments: list[str]) -> int:
    command = parse(Convert, arguments, "convert")
    if (Path(command.output) / "experiment.json").exists():
        raise ValueError(f"{command.output} is the working directory of a run; write to another one")
    loaded = load(command.checkpoint, which=command.which)
    loaded.save_pretrained(command.output)
    print(f"wrote {command.output}")
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (train_command, "train the model of a config, or continue a training"),
    "evaluate": (evaluate_command, "score a checkpoint on held-out data"),
    "predict": (predict_command, "say what a model makes of new inputs"),
    "generate": (generate_command, "write text that continues a prompt"),
    "translate": (translate_command, "translate text, line by line"),
    "draw": (draw_command, "make pictures with an Image GPT, or complete given ones"),
    "probe": (probe_command, "train a linear classifier on an Image GPT's features, layer by layer"),
    "patterns": (patterns_command, "draw attention patterns as text and as a picture"),
    "plan": (plan_command, "say what a training needs: memory, FLOPs, communication, time"),
    "convert": (convert_command, "write a checkpoint in the Hugging Face layout"),
}
USAGE = "usage: transformers-jax COMMAND [OPTIONS]; COMMAND --help lists the options\n\n" + "\n".join(
    f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items()
)
MISTAKES = (ValueError, OSError)  # of files and directories, but also a disk that is full

FAILURES = (TrainingDivergedError, ChildProcessError, LostProcessError)

INTERRUPTED = 75
"""The exit code (EX_TEMPFAIL) of many processes that a signal to one of them stopped."""

IN_ONE_PROCESS = ("evaluate", "predict", "generate", "translate", "draw", "probe", "convert")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. The exit code is 0, 2 for a mistake of the caller (processes that do not come together,
    too), or 1 for a training that diverged or lost one of its processes. A signal stops a single process with 0, and
    many with 75: the same command continues."""
    sys.exit(_main(list(sys.argv[1:] if arguments is None else arguments)))


def _main(arguments: list[str]) -> int:
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise ValueError(f"unknown command {name!r}; there are {', '.join(COMMANDS)}")
        prepare_process()
        if name in IN_ONE_PROCESS and (place := launched()) is not None and not wants_help(rest):
            raise ValueError(
                f"{name} works in a single process, and this is process {place[0]} of {place[1]}; start it once, or "
                "with JAX_NUM_PROCESSES=1 where that is meant"
            )
        return COMMANDS[name][0](rest)
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell says it of a program that SIGPIPE ends
    except (*MISTAKES, ImportError, *FAILURES) as error:
        if "--debug" in rest:
            raise
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        print(f"error: {message}", file=sys.stderr)
        return _exit_code(error)
    except KeyboardInterrupt:
        return 130


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, (*MISTAKES, ImportError)) and not isinstance(error, FAILURES) else 1


def _settings(arguments: Sequence[str]) -> dict[str, Any]:
    """`name=value` with Python's literals as values, anything else as text."""
    settings = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ValueError(f"--settings {argument} is not NAME=VALUE")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[name] = value
    return settings


def _stop_ids(loaded: Loaded) -> tuple[int, ...]:
    """The tokens that end a text, by the model's configuration and by the tokenizer."""
    named = loaded.model.config.eos_id
    named = named if isinstance(named, tuple) else (named,)
    vocabulary = range(loaded.model.config.vocab_size)  # a configuration may name an id that a small model lacks
    return tuple(sorted({token for token in (*named, loaded.processor.eos_id) if token in vocabulary}))


if __name__ == "__main__":
    main()
