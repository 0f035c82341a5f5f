"""Fine-tuning BERT in PyTorch (transformers): the figures that our fine-tuned models are held against.

    python benchmarks/reference_bert.py sst2 CHECKPOINT train.tsv dev.tsv
    python benchmarks/reference_bert.py wnut17 CHECKPOINT train.conll dev.conll
    python benchmarks/reference_bert.py xquad CHECKPOINT xquad.en.json

CHECKPOINT is a directory with a BERT encoder and its tokenizer. One recipe for all three: batch 32 (the last one of an
epoch may be smaller), padded to its longest row; AdamW 5e-5 with 10 % of the updates as warm-up, then linear to 0;
decay 0.01 on matrices and embeddings only; gradients clipped to 1; dropout 0.1; float32. The whole dev set is evaluated
after every epoch; the last line gives mean and standard deviation over the seeds after the last epoch.
"""

import argparse
import itertools
import json
import re
import statistics
import string
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from seqeval.metrics import f1_score, precision_score, recall_score
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

BATCH, PEAK, DECAY, WARM_UP, CLIP = 32, 5e-5, 0.01, 0.1, 1.0
MAX_LENGTH = 128  # pieces of a sentence, special ones included
WINDOW, OVERLAP, ANSWER_LENGTH = 256, 64, 30  # pieces
IGNORED = -100  # the label that PyTorch's cross entropy leaves out
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
HEADS = ("classifier.", "qa_outputs.")

Example = dict[str, Any]  # model inputs and labels of one row (lists by piece, or a number)
Metrics = dict[str, float]  # percent


@dataclass(frozen=True)
class Task:
    make_model: Callable[[], torch.nn.Module]
    train: list[Example]
    evaluate: Callable[[torch.nn.Module], Metrics]
    epochs: int
    dev_size: int


def collate(examples: Sequence[Example], keys: Sequence[str]) -> dict[str, Tensor]:
    """One batch, rows padded to the longest (BERT's padding piece is number 0)."""
    batch = {}
    for key in keys:
        rows = [torch.tensor(example[key]) for example in examples]
        if rows[0].ndim == 0:
            batch[key] = torch.stack(rows)
        else:
            fill = IGNORED if key == "labels" else 0
            batch[key] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
    return batch


@torch.inference_mode()
def predict(model: torch.nn.Module, examples: Sequence[Example]) -> list[Tensor]:
    """The logits of every example in order; those of start and end side by side. Rows keep their padding."""
    model.eval()
    rows: list[Tensor] = [torch.empty(0)] * len(examples)
    by_length = sorted(range(len(examples)), key=lambda i: len(examples[i]["input_ids"]))
    for chosen in (by_length[i : i + BATCH] for i in range(0, len(by_length), BATCH)):
        output = model(**collate([examples[i] for i in chosen], INPUTS))
        logits = output.logits if "logits" in output else torch.stack((output.start_logits, output.end_logits), -1)
        for i, row in zip(chosen, logits, strict=True):
            rows[i] = row
    return rows


def load(auto_class: Any, checkpoint: Path, **config: Any) -> torch.nn.Module:
    """The encoder of the checkpoint under a new head."""
    model, info = auto_class.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True, **config)
    if missing := [key for key in info["missing_keys"] if not key.startswith(HEADS)]:
        raise ValueError(f"{checkpoint} lacks {', '.join(sorted(missing))}")
    return model


# Sentence classification -------------------------------------------------------------------------------------------


def read_sentences(path: Path, limit: int | None) -> tuple[list[str], list[int]]:
    """Texts and labels of lines `text TAB label`."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")[:limit]
    texts, labels = zip(*(line.rsplit("\t", 1) for line in lines), strict=True)
    return list(texts), [int(label) for label in labels]


def sst2(options: argparse.Namespace, tokenizer: Any) -> Task:
    def examples(path: Path) -> list[Example]:
        texts, labels = read_sentences(path, options.limit)
        rows = tokenizer(texts, truncation=True, max_length=MAX_LENGTH, return_token_type_ids=True)
        return [{key: rows[key][i] for key in INPUTS} | {"labels": label} for i, label in enumerate(labels)]

    train, dev = examples(options.train), examples(options.dev)

    def evaluate(model: torch.nn.Module) -> Metrics:
        right = [
            row.argmax().item() == example["labels"] for row, example in zip(predict(model, dev), dev, strict=True)
        ]
        return {"accuracy": 100 * statistics.mean(right)}

    classes = max(example["labels"] for example in train) + 1
    model_class = transformers.AutoModelForSequenceClassification
    return Task(lambda: load(model_class, options.checkpoint, num_labels=classes), train, evaluate, 3, len(dev))


# Entities ----------------------------------------------------------------------------------------------------------


def read_conll(path: Path, limit: int | None) -> tuple[list[list[str]], list[list[str]]]:
    """Words and tags of the sentences of lines `word TAB tag`; a line without a word ends a sentence."""
    lines = (line.split("\t") for line in path.read_text(encoding="utf-8").split("\n"))
    blocks = [list(block) for filled, block in itertools.groupby(lines, key=lambda line: line[0] != "") if filled]
    sentences = [list(zip(*block, strict=True)) for block in blocks[:limit]]
    return [list(words) for words, _ in sentences], [list(tags) for _, tags in sentences]


def wnut17(options: argparse.Namespace, tokenizer: Any) -> Task:
    train_words, train_tags = read_conll(options.train, options.limit)
    dev_words, dev_tags = read_conll(options.dev, options.limit)
    names = sorted({tag for tags in train_tags for tag in tags})
    number = {name: i for i, name in enumerate(names)}

    def examples(sentences: list[list[str]], tags: list[list[str]] | None) -> list[Example]:
        rows = tokenizer(sentences, is_split_into_words=True, truncation=True, max_length=MAX_LENGTH,
                         return_token_type_ids=True)  # fmt: skip
        made = []
        for i in range(len(sentences)):
            words = rows.word_ids(i)
            # The first piece of each word; a word that was cut off or has no piece is not in here.
            first = {word: place for place, word in reversed(list(enumerate(words))) if word is not None}
            example = {key: rows[key][i] for key in INPUTS} | {"first": first}
            if tags is not None:
                labels = [IGNORED] * len(words)
                for word, place in first.items():
                    labels[place] = number[tags[i][word]]
                example["labels"] = labels
            made.append(example)
        return made

    dev = examples(dev_words, None)

    def evaluate(model: torch.nn.Module) -> Metrics:
        predicted = []
        for words, example, row in zip(dev_words, dev, predict(model, dev), strict=True):
            best = row.argmax(-1).tolist()
            first = example["first"]
            predicted.append([names[best[first[word]]] if word in first else "O" for word in range(len(words))])
        metrics = {"precision": precision_score, "recall": recall_score, "F1": f1_score}
        return {name: 100 * float(metric(dev_tags, predicted)) for name, metric in metrics.items()}

    model_class = transformers.AutoModelForTokenClassification
    train = examples(train_words, train_tags)
    return Task(lambda: load(model_class, options.checkpoint, num_labels=len(names)), train, evaluate, 5, len(dev))


# Answer spans ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    text: str
    context: str
    answers: list[str]
    start: int  # the first answer's first character in the context

    def windows(self, tokenizer: Any) -> Iterator[Example]:
        """Rows of question and a part of the context, labelled with the answer's pieces, or [CLS] without it all."""
        rows = tokenizer(self.text, self.context, truncation="only_second", max_length=WINDOW, stride=OVERLAP,
                         return_overflowing_tokens=True, return_offsets_mapping=True,
                         return_token_type_ids=True)  # fmt: skip
        last = self.start + len(self.answers[0]) - 1
        for i in range(len(rows["input_ids"])):
            parts = zip(rows["offset_mapping"][i], rows.sequence_ids(i), strict=True)
            spans = [span if part == 1 else None for span, part in parts]
            begin = [place for place, span in enumerate(spans) if span and span[0] <= self.start < span[1]]
            end = [place for place, span in enumerate(spans) if span and span[0] <= last < span[1]]
            label = (begin[0], end[0]) if begin and end else (0, 0)
            yield {key: rows[key][i] for key in INPUTS} | {
                "start_positions": label[0], "end_positions": label[1], "spans": spans}  # fmt: skip


def best_span(logits: Tensor, spans: list[tuple[int, int] | None]) -> tuple[float, int, int]:
    """Score of the best answer of a window, and the characters of the context where it begins and ends."""
    length = len(spans)
    start, end = logits[:length].unbind(-1)
    scores = start[:, None] + end
    allowed = torch.ones(length, length, dtype=torch.bool).triu().tril(ANSWER_LENGTH - 1)
    inside = torch.tensor([span is not None for span in spans])
    scores = scores.masked_fill(~(allowed & inside[:, None] & inside), -torch.inf)
    first, last = divmod(int(scores.argmax()), length)
    return scores[first, last].item(), spans[first][0], spans[last][1]


def normalize(text: str) -> list[str]:
    """The words that SQuAD v1.1 compares: lower case, without punctuation and articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def exact_and_f1(predicted: str, answer: str) -> tuple[float, float]:
    ours, right = normalize(predicted), normalize(answer)
    common = (Counter(ours) & Counter(right)).total()
    return float(ours == right), 2 * common / (len(ours) + len(right)) if common else 0.0


def read_questions(articles: list[dict[str, Any]]) -> list[Question]:
    return [
        Question(item["question"], paragraph["context"], [a["text"] for a in item["answers"]],
                 item["answers"][0]["answer_start"])
        for article in articles for paragraph in article["paragraphs"] for item in paragraph["qas"]
    ]  # fmt: skip


def xquad(options: argparse.Namespace, tokenizer: Any) -> Task:
    articles = json.loads(options.data.read_text(encoding="utf-8"))["data"]
    whole = int(0.8 * len(articles))
    train = [w for q in read_questions(articles[:whole])[: options.limit] for w in q.windows(tokenizer)]
    questions = read_questions(articles[whole:])[: options.limit]
    dev = [window | {"question": i} for i, q in enumerate(questions) for window in q.windows(tokenizer)]

    def evaluate(model: torch.nn.Module) -> Metrics:
        best = [(-torch.inf, 0, 0)] * len(questions)
        for window, row in zip(dev, predict(model, dev), strict=True):
            i = window["question"]
            best[i] = max(best[i], best_span(row, window["spans"]), key=lambda span: span[0])
        scores = []
        for question, (_, begin, end) in zip(questions, best, strict=True):
            pairs = [exact_and_f1(question.context[begin:end], answer) for answer in question.answers]
            scores.append([max(kind) for kind in zip(*pairs, strict=True)])
        exact, f1 = (100 * statistics.mean(kind) for kind in zip(*scores, strict=True))
        return {"exact match": exact, "F1": f1}

    model_class = transformers.AutoModelForQuestionAnswering
    return Task(lambda: load(model_class, options.checkpoint), train, evaluate, 5, len(questions))


# Training ----------------------------------------------------------------------------------------------------------


def learning_rate(update: int, updates: int) -> float:
    warm_up = round(WARM_UP * updates)
    return PEAK * (update / warm_up if update < warm_up else (updates - update) / (updates - warm_up))


def train(task: Task, *, seed: int, epochs: int) -> Iterator[Metrics]:
    """The dev set's metrics after every epoch, with the epoch's mean training loss and its seconds."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = task.make_model()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},  # biases and layer norms
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.999), eps=1e-8)
    keys = [key for key in task.train[0] if key in (*INPUTS, "labels", "start_positions", "end_positions")]
    updates = epochs * -(-len(task.train) // BATCH)
    update = 0
    for _ in range(epochs):
        begin = time.perf_counter()
        model.train()
        losses = []
        for chosen in torch.randperm(len(task.train), generator=generator).split(BATCH):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(update, updates)
            loss = model(**collate([task.train[i] for i in chosen.tolist()], keys)).loss
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            losses.append(loss.item())
            update += 1
        trained = time.perf_counter()
        metrics = task.evaluate(model)
        yield metrics | {"loss": statistics.mean(losses), "training seconds": trained - begin,
                         "dev seconds": time.perf_counter() - trained}  # fmt: skip


def show(metrics: Metrics) -> str:
    return ", ".join(f"{name} {value:.{4 if name == 'loss' else 2}f}" for name, value in metrics.items())


def main() -> None:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("checkpoint", type=Path, help="directory of a BERT encoder and its tokenizer")
    shared.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    shared.add_argument("--epochs", type=int, help="3 for sst2, 5 for the others unless given")
    shared.add_argument("--limit", type=int, help="use only so many examples of each part, for a quick trial")
    shared.add_argument("--threads", type=int, help="PyTorch's own choice unless given")
    shared.add_argument("--json", type=Path, help="append one line of JSON per epoch to this file")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="task", required=True)
    for name in ("sst2", "wnut17"):
        command = commands.add_parser(name, parents=[shared])
        command.add_argument("train", type=Path)
        command.add_argument("dev", type=Path)
    commands.add_parser("xquad", parents=[shared]).add_argument("data", type=Path)
    options = parser.parse_args()

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.checkpoint)
    task = {"sst2": sst2, "wnut17": wnut17, "xquad": xquad}[options.task](options, tokenizer)
    epochs = options.epochs or task.epochs
    pieces = statistics.mean(len(example["input_ids"]) for example in task.train)
    print(f"{options.task}: torch {torch.__version__}, transformers {transformers.__version__}, "
          f"{torch.get_num_threads()} threads; {len(task.train):,} rows of {pieces:.1f} pieces to train on, "
          f"dev set of {task.dev_size:,}; {epochs * -(-len(task.train) // BATCH):,} updates", flush=True)  # fmt: skip

    final: list[Metrics] = []
    for seed in options.seeds:
        for epoch, metrics in enumerate(train(task, seed=seed, epochs=epochs), start=1):
            print(f"seed {seed} epoch {epoch}: {show(metrics)}", flush=True)
            if options.json is not None:
                line = {"task": options.task, "seed": seed, "epoch": epoch, "epochs": epochs} | metrics
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        final.append(metrics)
    if len(final) > 1:
        for name in final[0]:
            values = [metrics[name] for metrics in final]
            print(f"{name}: mean {statistics.mean(values):.4g}, standard deviation {statistics.stdev(values):.3g}")


if __name__ == "__main__":
    main()
