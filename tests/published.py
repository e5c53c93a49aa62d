"""Made-up examples of each task in the format in which it is published."""

import hashlib
import json
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from data_pipeline.document import Document
from data_pipeline.papers.glue import TASKS
from data_pipeline.papers.lra.listops import ListOps

WORDS = ["a", "dull", "film", "brilliant", "déjà", "vu", "and", "then", "nothing", "happens"]


def sentence(draw: random.Random) -> str:
    """A few words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(2, 8)))


def imdb(folder: Path, of_each: int = 4) -> Path:
    """aclImdb/{train,test}/{pos,neg}/N_RATING.txt."""
    draw = random.Random(0)
    for split in ("train", "test"):
        for label, rating in (("neg", 2), ("pos", 9)):
            place = folder / split / label
            place.mkdir(parents=True)
            for number in range(of_each):
                (place / f"{number}_{rating}.txt").write_text(
                    f"{split} {label}: {sentence(draw)}", encoding="utf-8"
                )
    return folder


def spam(folder: Path, of_each: int = 4) -> Path:
    """data/GROUP/NUMBER.MD5.txt of the npm package, and data/file_list.json."""
    draw = random.Random(0)
    names = []
    for group in ("easy-ham-1", "easy-ham-2", "hard-ham-1", "spam-1", "spam-2"):
        (folder / "data" / group).mkdir(parents=True)
        for number in range(of_each):
            subject, body = f"{group} {number}", f"{sentence(draw)}\n\n{sentence(draw)}\n"
            headers = f"Delivered-To: {group}@localhost\nSubject: {subject}\nDate: today"
            mail = f"From someone\n{headers}\n\n{body}".encode()
            name = f"{group}/{number:05}.{hashlib.md5(mail).hexdigest()}.txt"
            (folder / "data" / name).write_bytes(mail)
            names.append(name)
    (folder / "data" / "file_list.json").write_text(json.dumps(names), encoding="utf-8")
    return folder


def aan(folder: Path, of_each: int = 4) -> Path:
    """new_aan_pairs.{train,eval,test}.tsv."""
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for split in ("train", "eval", "test"):
        lines = [
            f'{number % 2}.0\tP{number}\tQ{number}\t{split} {sentence(draw)}\t"{sentence(draw)}\n'
            for number in range(of_each)
        ]
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(lines), encoding="utf-8")
    return folder


def cifar(folder: Path, of_each: int = 10) -> Path:
    """data_batch_1 ... data_batch_5 and test_batch, pickled."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {
            b"batch_label": name.encode(),
            b"labels": [number % 10 for number in range(of_each)],
            b"data": draw.integers(0, 256, (of_each, 3072), dtype=np.uint8),
            b"filenames": [b"image.png"] * of_each,
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def listops(folder: Path, of_each: int = 6) -> tuple[Path, dict[str, list[Document]]]:
    """basic_{train,val,test}.tsv and their documents; each step of an expression is in parentheses."""
    task = ListOps(train=1, validation=0, test=0, min_length=5, max_length=60)
    folder.mkdir(parents=True)
    written: dict[str, list[Document]] = {}
    for split in ("train", "val", "test"):
        documents = [task.example(random.Random(f"{split}{number}"), number) for number in range(of_each)]
        lines = ["Source\tTarget"]
        lines += [f"{_in_parentheses(iter(row.texts[0].split()))}\t{row.label}" for row in documents]
        (folder / f"basic_{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        written[split] = documents
    return folder, written


def _in_parentheses(symbols: Iterator[str]) -> str:
    tree = next(symbols)
    if not tree.startswith("["):
        return tree
    for symbol in iter(symbols.__next__, None):
        symbol = _in_parentheses(chain([symbol], symbols)) if symbol != "]" else symbol
        tree = f"( {tree} {symbol} )"
        if symbol == "]":
            break
    return tree


_HEADERS = {
    "sst2": "sentence label",
    "mrpc": "Quality,#1 ID,#2 ID,#1 String,#2 String",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label",
    "qnli": "index question sentence label",
    "rte": "index sentence1 sentence2 label",
    "wnli": "index sentence1 sentence2 label",
}
_LABELS = {
    "stsb": ["0.000", "2.500", "5.000"],
    "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
}


def glue_columns(task: str) -> list[str]:
    """The columns of a task's files."""
    header = _HEADERS.get(task)
    if header is None:
        return list(TASKS[task].names)
    return header.split("," if "," in header else None)


def glue(folder: Path, task: str, of_each: int = 6) -> Path:
    """train.tsv and dev.tsv of a task; MNLI has two dev files."""
    draw = random.Random(task)
    layout, columns = TASKS[task], glue_columns(task)
    labels = _LABELS.get(task, ["0", "1"])
    folder.mkdir(parents=True)
    for name in layout.splits:
        lines = ["\t".join(columns)] if not layout.names else []
        for number in range(of_each):
            fields = {column: f"{column}-{number}" for column in columns}
            fields |= {text: f'{name} "{sentence(draw)}' for text in layout.texts}
            lines.append("\t".join((fields | {layout.label: labels[number % len(labels)]}).values()))
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {
    "lra:text": imdb,
    "lra:spam": spam,
    "lra:retrieval": aan,
    "lra:image": cifar,
}
