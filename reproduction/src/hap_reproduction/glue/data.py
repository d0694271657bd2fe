"""GLUE tasks from tab-separated files or by name: read, split, tokenised once, and kept padded on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hap.errors import HapError

Batch = tuple[dict[str, Tensor], Tensor]
BUCKETS = (16, 32, 48, 64, 80, 96, 128, 192, 256)
"""Batches are padded to one of these lengths, so that few shapes occur; longer texts are cut to the last."""

LABELS = ("label", "Quality")
FIRST = ("sentence1", "question", "#1 String", "sentence")
SECOND = ("sentence2", "#2 String", "sentence")
WORDS = {"entailment": 0, "not_entailment": 1}


@dataclass(frozen=True)
class Task:
    """A task with two classes. `score` is the mean of these metrics on its development set."""

    name: str
    folders: tuple[str, ...]
    metrics: tuple[str, ...]


TASKS = {
    t.name: t
    for t in (
        Task("mrpc", ("mrpc", "MRPC"), ("accuracy", "f1")),
        Task("sst2", ("sst2", "SST-2"), ("accuracy",)),
        Task("rte", ("rte", "RTE"), ("accuracy",)),
        Task("qnli", ("qnli", "QNLI"), ("accuracy",)),
    )
}
HELD_OUT, SPLIT_SEED = 1500, 0
"""Where a folder has no train.tsv, so many examples of dev.tsv are held out, chosen with this seed."""


@dataclass(frozen=True)
class Texts:
    """Sentences, or pairs of them (`second` is None for single ones), with labels."""

    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, index: Sequence[int]) -> Texts:
        second = None if self.second is None else tuple(self.second[i] for i in index)
        return Texts(tuple(self.first[i] for i in index), second, tuple(self.labels[i] for i in index))


@dataclass(frozen=True)
class Corpus:
    """A task's examples to train on and to be judged by. `name` says what they are: "qnli-dev" is QNLI's development
    set split in two, since its training set was not there."""

    task: Task
    name: str
    train: Texts
    dev: Texts


def read(source: str | Path, task: str) -> Corpus:
    """A task from a folder that holds train.tsv and dev.tsv, itself or in a folder of the task's name; or, if there is
    no such folder, from the data set of that name on Hugging Face's hub, such as nyu-mll/glue."""
    if task not in TASKS:
        raise HapError(f"task is {task!r}; expected one of {', '.join(TASKS)}")
    if Path(source).is_dir():
        return _read_folder(Path(source), TASKS[task])
    return _read_named(str(source), TASKS[task])


def _read_named(name: str, info: Task) -> Corpus:
    """A task by the name of a data set that the package datasets can find, with GLUE's splits and columns."""
    try:
        import datasets
    except ImportError as error:
        raise HapError(
            f"there is no folder {name}, and to find a data set of that name takes a package: pip install datasets"
        ) from error
    try:
        found = datasets.load_dataset(name, info.name)
        return Corpus(info, info.name, *(_from_table(name, found[split]) for split in ("train", "validation")))
    except (OSError, ValueError, KeyError) as error:
        raise HapError(f"there is no folder {name}, nor a data set with {info.name}: {error}") from error


def _from_table(name: str, table: Any) -> Texts:
    header = list(table.column_names)
    label, first, second = _columns(name, header)
    pairs = None if second is None else tuple(table[header[second]])
    return Texts(tuple(table[header[first]]), pairs, tuple(_label(name, str(x)) for x in table[header[label]]))


def _read_folder(folder: Path, info: Task) -> Corpus:
    """Without train.tsv the development set is split: all but 1,500 examples to train on, those to be judged by."""
    task = info.name
    places = [folder / name for name in info.folders] + [folder]
    place = next((p for p in places if (p / "dev.tsv").is_file()), None)
    if place is None:
        raise HapError(f"{folder} holds no {task}: expected dev.tsv (and train.tsv) in {places[0]} or in {folder}")
    dev = read_tsv(place / "dev.tsv")
    if (place / "train.tsv").is_file():
        return Corpus(info, task, read_tsv(place / "train.tsv"), dev)
    if len(dev) <= HELD_OUT:
        raise HapError(f"{place} has no train.tsv, and its {len(dev)} examples are too few to be split")
    order = torch.randperm(len(dev), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    return Corpus(info, f"{task}-dev", dev.pick(order[HELD_OUT:]), dev.pick(order[:HELD_OUT]))


def read_tsv(path: Path) -> Texts:
    """A file with a header line, in GLUE's own layouts: label, sentence1, sentence2, or the names of a task's own."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    header = lines[0].rstrip("\r").split("\t")
    label, first, second = _columns(path, header)
    rows = [line.rstrip("\r").split("\t") for line in lines[1:] if line.strip()]
    bad = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
    if bad is not None:
        raise HapError(f"{path}, line {bad + 2}: {len(rows[bad])} fields; expected {len(header)}, as in its header")
    labels = tuple(_label(path, row[label]) for row in rows)
    pairs = None if second is None else tuple(row[second] for row in rows)
    return Texts(tuple(row[first] for row in rows), pairs, labels)


def _columns(source: str | Path, header: list[str]) -> tuple[int, int, int | None]:
    """Where the label and the sentences are; there is no second one in tasks of single sentences."""
    label, first = (_column(source, header, names) for names in (LABELS, FIRST))
    second = next((header.index(n) for n in SECOND if n in header and header.index(n) != first), None)
    return label, first, second


def _column(source: str | Path, header: list[str], names: Sequence[str]) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    raise HapError(f"{source} has the columns {', '.join(header)}; expected one named {' or '.join(names)}")


def _label(path: str | Path, text: str) -> int:
    if text in ("0", "1"):
        return int(text)
    if text not in WORDS:
        raise HapError(f"{path} has the label {text!r}; expected 0, 1, {' or '.join(WORDS)}")
    return WORDS[text]


@dataclass(frozen=True)
class Encoded:
    """Tokenised examples: every column of `inputs` is (examples, longest), padded; `lengths` is on the CPU."""

    inputs: dict[str, Tensor]
    labels: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Encoded:
        return Encoded({k: v.to(device) for k, v in self.inputs.items()}, self.labels.to(device), self.lengths)

    def head(self, count: int, seed: int = 0) -> Encoded:
        """So many examples, chosen with a seed."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        return self._take(order)

    def _take(self, order: Tensor) -> Encoded:
        index = order.to(self.labels.device)
        return Encoded({k: v[index] for k, v in self.inputs.items()}, self.labels[index], self.lengths[order])

    def batches(self, size: int) -> Iterator[Batch]:
        """All examples, short ones first; the last batch may be smaller."""
        order = self.lengths.argsort(stable=True)
        for part in order.split(size):
            yield self._batch(part.to(self.labels.device), int(self.lengths[part].max()))

    def epoch(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of equal size in random order, each of texts of similar length; what is left over is dropped."""
        order = torch.randperm(len(self), generator=generator)
        near = [part[self.lengths[part].argsort(stable=True)] for part in order.split(32 * size)]
        whole = torch.cat(near)[: len(self) // size * size].view(-1, size)
        whole = whole[torch.randperm(len(whole), generator=generator)]
        longest = self.lengths[whole].amax(1).tolist()
        for row, length in zip(whole.to(self.labels.device), longest, strict=True):
            yield self._batch(row, length)

    def _batch(self, index: Tensor, length: int) -> Batch:
        longest = next(iter(self.inputs.values())).shape[1]
        width = min(next((b for b in BUCKETS if b >= length), longest), longest)
        return {k: v[index, :width].long() for k, v in self.inputs.items()}, self.labels[index]


def encode(texts: Texts, tokenizer: Any, longest: int = BUCKETS[-1]) -> Encoded:
    """Tokenise with a Hugging Face tokenizer; what is longer than `longest` tokens is cut."""
    pairs = () if texts.second is None else (list(texts.second),)
    made = tokenizer(list(texts.first), *pairs, truncation=True, max_length=longest, padding=True, return_tensors="pt")
    lengths = made["attention_mask"].sum(1)
    width = next((b for b in BUCKETS if b >= int(lengths.max())), int(lengths.max()))
    pad = {"input_ids": tokenizer.pad_token_id or 0}
    columns = {
        name: torch.nn.functional.pad(made[name], (0, width - made[name].shape[1]), value=pad.get(name, 0)).int()
        for name in ("input_ids", "attention_mask", "token_type_ids")
        if name in made
    }
    return Encoded(columns, torch.tensor(texts.labels), lengths)


def metrics_of(predicted: Tensor, labels: Tensor, task: Task) -> dict[str, float]:
    """The task's metrics, from 0 to 1, and `score`, their mean: GLUE's figure for the task."""
    right = float((predicted == labels).double().mean())
    hits = int(((predicted == 1) & (labels == 1)).sum())
    marked = int((predicted == 1).sum()) + int((labels == 1).sum())
    found = {"accuracy": right, "f1": 2 * hits / marked if marked else 0.0}
    values = {name: found[name] for name in task.metrics}
    return values | {"score": sum(values.values()) / len(values)}
