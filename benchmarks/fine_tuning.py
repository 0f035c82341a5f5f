"""Examples a second over an epoch of fine-tuning SST-2, as a person waits for it: reading, tokenizing and compiling
included, imports and the dev set not.

    python benchmarks/fine_tuning.py CHECKPOINT train.tsv dev.tsv

Ours is the config bert_classify (rows of similar length meet, padded to a bucket) with an empty compilation cache;
PyTorch is benchmarks/reference_bert.py (padded to the longest row of a batch, dynamic padding), and once more with rows
of similar length together (transformers' `group_by_length`). They take turns, each time as a new process.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import machine, warn_if_busy

CONTENDERS = ("ours", "torch", "torch_grouped")


def ours(options: argparse.Namespace) -> None:
    from transformers_jax.experiment import load_config
    from transformers_jax.running import run
    from transformers_jax.training.process import prepare_process

    experiment = load_config("bert_classify")
    data = dataclasses.replace(
        experiment.data,
        source=str(options.train),
        validation_source=str(options.dev),
        text_column="0",
        label_column="1",
    )
    training = dataclasses.replace(experiment.training, epochs=1)
    experiment = dataclasses.replace(
        experiment, data=data, training=training, initial_checkpoint=str(options.checkpoint)
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        prepare_process()
        begin = time.perf_counter()
        # The dev set counts for none of the contenders: its time is taken off.
        import transformers_jax.running as module

        dev_seconds = 0.0
        make_evaluate = module.make_evaluate

        def timed(*arguments, **keywords):
            evaluate = make_evaluate(*arguments, **keywords)

            def call(model):
                nonlocal dev_seconds
                started = time.perf_counter()
                metrics = evaluate(model)
                dev_seconds += time.perf_counter() - started
                return metrics

            return call

        module.make_evaluate = timed
        run(experiment, Path(folder) / "run")
        print("RESULT", time.perf_counter() - begin - dev_seconds)


def torch(options: argparse.Namespace, *, grouped: bool = False) -> None:
    import reference_bert
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    begin = time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.checkpoint)
    task = reference_bert.sst2(argparse.Namespace(**vars(options), limit=None), tokenizer)
    if grouped:
        randperm, batch = torch.randperm, reference_bert.BATCH

        def by_length(count: int, generator: torch.Generator) -> torch.Tensor:
            order = randperm(count, generator=generator)
            groups = [
                sorted(group.tolist(), key=lambda i: len(task.train[i]["input_ids"]))
                for group in order.split(16 * batch)
            ]
            batches = [torch.tensor(group[i : i + batch]) for group in groups for i in range(0, len(group), batch)]
            return torch.cat(batches)

        torch.randperm = by_length
    metrics = next(reference_bert.train(task, seed=0, epochs=1))
    print("RESULT", time.perf_counter() - begin - metrics["dev seconds"])


def measure(name: str, options: argparse.Namespace) -> float:
    command = [sys.executable, __file__, str(options.checkpoint), str(options.train), str(options.dev), "--only", name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path[:1], str(Path(__file__).parents[1])])}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"{name} failed:\n{result.stderr[-2000:]}")
    return float(next(line.split()[1] for line in result.stdout.splitlines() if line.startswith("RESULT")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="directory of a BERT encoder and its tokenizer")
    parser.add_argument("train", type=Path)
    parser.add_argument("dev", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=CONTENDERS, help="be this contender (used by the script itself)")
    options = parser.parse_args()
    if options.only is not None:
        ours(options) if options.only == "ours" else torch(options, grouped=options.only == "torch_grouped")
        return

    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, load average {about['load']:.2f}")
    warn_if_busy(about["load"])
    examples = len(options.train.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    seconds = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name in CONTENDERS:
            seconds[name].append(measure(name, options))
            print(f"  {name}: {seconds[name][-1]:.0f} s", file=sys.stderr, flush=True)
    fastest = statistics.median(seconds["ours"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:14} {median:7.1f} s   {examples / median:6.1f} examples/s   ratio {median / fastest:5.2f}")


if __name__ == "__main__":
    main()
