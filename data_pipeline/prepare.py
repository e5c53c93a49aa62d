"""Documents to a prepared folder: Megatron token files per split, the tokenizer, and a manifest."""

import errno
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from fnmatch import fnmatch
from functools import partial
from glob import escape
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from data_pipeline import tokenizers
from data_pipeline.chat import ChatTemplate
from data_pipeline.document import TEXT, Columns, Document
from data_pipeline.encoding import HASHES, batched, content_hash, encode, parallel_map
from data_pipeline.labels import write_labels
from data_pipeline.manifest import FILE as MANIFEST
from data_pipeline.manifest import FileRecord, LabelsRecord, Manifest, SplitRecord, TokenizerRecord
from data_pipeline.sources import (
    BENCHMARKS,
    HUB,
    TABLES,
    TSV,
    DocumentSource,
    Files,
    hub_source,
    is_unicode,
    library_files,
    library_source,
    table_kind,
)
from data_pipeline.token_files import TokenWriter, token_dtype
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.verification import verify_tokenizer
from megakernel.config.errors import UserError, first_line, report_write_errors

_log = logging.getLogger(__name__)


class PrepareRequest(BaseModel):
    """The options that determine a prepared folder's content; a field's docstring is its option's help."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    source: list[str]
    """Directories and files (.jsonl, .ndjson, .parquet and, with --labels, .tsv hold a document per row, any other
    UTF-8 file is one document), hf:NAME[:CONFIG] for a dataset of the hub, stdlib (this Python's library; with --labels
    package, functions of eight of its packages), task:NAME[:key=value,...] for generated examples (docs/evaluation.md),
    or a labeled task (docs/benchmarks.md): lra:listops, lra:pathfinder and sparsity are generated (options:
    lra:listops:train=1000,max_length=200); lra:listops, lra:text, lra:retrieval, lra:image and glue:TASK are read from
    their published files (lra:listops:FOLDER) or the hub (glue:cola:hf:NAME:CONFIG)."""

    tokenizer: str
    """Byte, bpe:SIZE (trained on the first 100 million characters), words (split at spaces), pixels (images), or a
    Hugging Face directory or hub name."""

    validation_fraction: float = 0.02
    """Share of the documents held out for validation, by a hash of their text; at least one document, unless 0."""

    seed: int = 0
    """Seed of the validation split, and of generated examples (those of a task:NAME with seed=S have S)."""

    text_key: str = "text"
    """Column with the text of a row."""

    labels: str | None = None
    """Column with the class of a row, for a classifier."""

    second_text_key: str | None = None
    """Column with a second text, to compare with the first (labeled rows only)."""

    split: str = "train"
    """Split of a hub dataset to read."""

    include: tuple[str, ...] = ()
    """File name patterns to read inside directories ('*.py')."""

    max_documents: int | None = None
    """Read only the first documents."""

    add_bos: bool | None = None
    """Begin every document with the tokenizer's beginning-of-sequence token, or not (default: as the tokenizer
    itself does)."""

    chat: bool = False
    """Rows are conversations, lists of {role, content}: the tokenizer's chat template renders them, and only the
    assistant's tokens count in the loss."""

    chat_template: Path | None = None
    """File with a chat template to use instead of the tokenizer's."""

    @property
    def columns(self) -> Columns:
        """The columns to read from a table."""
        second = () if self.second_text_key is None else (self.second_text_key,)
        return Columns((self.text_key, *second), self.labels, chat=self.chat)

    def arguments(self) -> dict[str, Any]:
        """The options as JSON values; paths of sources are absolute, so that the current folder does not matter."""
        if source_kind(self.source) is None:
            source = [str(Path(path).resolve()) for path in self.source]
        else:
            source = [_with_absolute_path(self.source[0])]
        template = None if self.chat_template is None else digest(self.read_template() or "")
        return {
            **self.model_dump(),
            "source": source,
            "include": list(self.include),
            "chat_template": template,
        }

    def read_template(self) -> str | None:
        """The text of the file `chat_template`, None without one. Raises UserError if it cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--chat-template {self.chat_template} cannot be read ({first_line(error)}); give a Jinja file"
            ) from None

    def without_effect(self) -> dict[str, str]:
        """The options that the source has no use for, with the reason."""
        kind, source = source_kind(self.source), f"--source {' '.join(self.source)}"
        # A missing directory is no reason: `open_source` says that it is missing, and a finished `out` needs none.
        names_folder = kind is None and not all(map(os.path.isfile, self.source))
        is_table = kind is None and any(table_kind(Path(path)) for path in self.source)
        reasons = {}
        if kind != HUB:
            reasons["split"] = f"is of a hub dataset, and {source} is not hf:NAME"
        if not names_folder:
            reasons["include"] = f"chooses files of directories, and {source} names none"
        if kind in BENCHMARKS:
            reasons["validation_fraction"] = f"splits documents, and {source} is already split"
        # With labels or conversations other errors say what is no table.
        if not (kind == HUB or names_folder or is_table or self.labels is not None or self.chat):
            reasons["text_key"] = f"is a column of tables, and {source} has none"
        return reasons

    def check(self) -> None:
        """UserError for invalid options or combinations of them."""
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"--validation-fraction {self.validation_fraction} must lie in [0, 1)")
        if self.second_text_key is not None and self.labels is None:
            raise UserError(f"--second-text-key {self.second_text_key} needs labels; add --labels KEY")
        if self.chat_template is not None and not self.chat:
            raise UserError(f"--chat-template {self.chat_template} needs conversations; add --chat")
        if self.chat and self.labels is not None:
            raise UserError(
                f"--labels {self.labels}: conversations have no classes; leave out --labels or --chat"
            )
        if self.chat and self.add_bos is not None:
            raise UserError("--add-bos: the chat template says how conversations begin; leave it out")
        for name, reason in self.without_effect().items():
            if (value := getattr(self, name)) != _DEFAULTS[name]:
                text = " ".join(value) if isinstance(value, tuple) else value
                raise UserError(f"--{name.replace('_', '-')} {text} {reason}; leave it out")
        for key, value in self.arguments().items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not is_unicode(text):
                    raise UserError(f"--{key.replace('_', '-')} {text!a} is not UTF-8; rename it")


_DEFAULTS = {name: field.default for name, field in PrepareRequest.model_fields.items()}
"""Values of options that are absent from manifests of earlier versions."""


_BEFORE_PATH = re.compile(
    r"task:.*?[:,]filler=(?!(?:sentences|validation)(?:,|$))|(?:lra|glue):[^:]*:(?!hf:|[^,]*=|$)"
)
"""What is before the path in the name of a source that has one."""


def _with_absolute_path(spec: str) -> str:
    """The name of a source with its path made absolute; one that is absolute stays as it is written."""
    if (before := _BEFORE_PATH.match(spec)) is None:
        return spec
    path, comma, after = spec[before.end() :].partition(",")
    return spec if os.path.isabs(path) else f"{before[0]}{os.path.abspath(path)}{comma}{after}"


def digest(text: str) -> str:
    """SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()


def prepare(
    request: PrepareRequest, out: Path, *, workers: int, overwrite: bool, console: Console
) -> Manifest | None:
    """Prepare folder `out`; None if an equal request made it before and its files are intact.

    The folder appears complete or not at all. Raises UserError for what cannot be prepared, and for an existing
    folder with other content, unless `overwrite`.
    """
    request.check()
    with report_write_errors("--out", out):
        exists = out.exists()
    if exists and not _is_prepared(out):  # never replace what prepare did not make
        raise UserError(
            f"--out {out} exists and is not a prepared folder; choose another --out, or remove it"
        )
    if exists and not overwrite:
        _check_same_request(request, out)
        return None
    source = open_source(
        request.source,
        columns=request.columns,
        split=request.split,
        include=request.include,
        seed=request.seed,
        workers=workers,
    )
    if source.endless and request.max_documents is None:
        raise UserError(
            f"--source {' '.join(request.source)} has no end; say how many with --max-documents N"
        )
    _report_leftovers(out, console)
    with report_write_errors("--out", out), atomic_folder(out, overwrite=overwrite) as folder:
        with console.status("tokenizer"):
            texts = (text for document in _documents(source, request) for text in document.texts)
            tokenizer = tokenizers.make(request.tokenizer, texts, add_bos=request.add_bos)
            if request.chat:
                tokenizer.chat_template = request.read_template() or tokenizer.chat_template
                ChatTemplate(tokenizer)  # fails now if there is none
            tokenizer.save(folder / "tokenizer")
        source.set_tokenizer(tokenizer)
        splits, labels = _write_splits(source, request, tokenizer, workers, folder, console)
        manifest = Manifest(
            source=source.description,
            arguments=request.arguments(),
            tokenizer=TokenizerRecord(
                kind=tokenizer.kind,
                vocab_size=tokenizer.vocab_size,
                eod=tokenizer.eod,
                hash=tokenizer.hash,
                bos=next(iter(tokenizer.prefix), None),
            ),
            splits=splits,
            labels=labels,
            chat_template=digest(tokenizer.chat_template or "") if request.chat else None,
            skipped=dict(source.skipped),
            versions={
                name: version(name) for name in ("megatron-core", "datasets", "tokenizers", "transformers")
            },
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        manifest.write(folder)
    return manifest


def _is_prepared(folder: Path) -> bool:
    """Whether `prepare` made a folder, which may be damaged; other programs also write files named manifest.json."""
    parts = (folder / "tokenizer", folder / "train.idx")
    # Unlike methods of Path these raise nothing for a folder that cannot be read.
    return os.path.isfile(folder / MANIFEST) and any(map(os.path.exists, parts))


def _documents(source: DocumentSource, request: PrepareRequest) -> Iterator[Document]:
    return islice(iter(source), request.max_documents)


def _write_splits(
    source: DocumentSource,
    request: PrepareRequest,
    tokenizer: Tokenizer,
    workers: int,
    folder: Path,
    console: Console,
) -> tuple[dict[str, SplitRecord], LabelsRecord | None]:
    """Encode and write every document; returns the records of nonempty splits, and that of the labels if any."""
    dtype = token_dtype(tokenizer.vocab_size)
    writers: dict[str, TokenWriter] = {}
    with _progress(console) as progress:
        limits = [limit for limit in (source.total, request.max_documents) if limit is not None]
        task = progress.add_task("documents", total=min(limits, default=None), tokens=0)
        batches = batched(_documents(source, request))
        bound = _validation_bound(source, request)
        encoder_arguments = folder / "tokenizer", dtype.__name__, request.seed, bound
        for splits in parallel_map(partial(encode, encoder_arguments), batches, workers):
            for split, encoded in splits.items():
                writer = writers.setdefault(split, TokenWriter(folder / split, dtype))
                writer.add(encoded)
            read = sum(writer.documents for writer in writers.values()) + source.skipped.total()
            progress.update(task, completed=read, tokens=sum(writer.tokens for writer in writers.values()))
    records = {split: writer.finish() for split, writer in writers.items() if writer.documents}
    if not records:
        raise UserError(f"--source {' '.join(request.source)} holds no text; give files with text in them")
    if "train" not in records:
        raise UserError(
            f"--source {' '.join(request.source)} has no example to train on; give all of its files"
        )
    labels = {split: writers[split].labels for split in records}
    if not any(labels.values()):
        return records, None
    classes, files = write_labels(folder, labels, source.classes)
    rows = records["train"].documents // len(labels["train"])
    return records, LabelsRecord(documents=rows, classes=classes, files=files)


def _validation_bound(source: DocumentSource, request: PrepareRequest) -> float:
    """The `content_hash` below which documents are for validation: that fraction of all hashes.

    If few documents leave a split empty, the bound moves just far enough to give it one. Reads documents only until
    both splits have one. Raises UserError if there are no two different documents.
    """
    bound = request.validation_fraction * HASHES
    if not bound or source.has_splits:
        return bound
    smallest, largest = HASHES, -1
    for document in _documents(source, request):
        hashed = content_hash(document.content, request.seed)
        smallest, largest = min(smallest, hashed), max(largest, hashed)
        if smallest < bound <= largest:
            return bound
    if smallest == largest:
        raise UserError(
            f"--validation-fraction {request.validation_fraction} cannot split one document (documents stay whole); "
            "give more documents, or set the fraction to 0 for no validation split"
        )
    return largest if largest < bound else smallest + 1


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        console=console,
    )


def _check_same_request(request: PrepareRequest, out: Path) -> None:
    manifest = Manifest.read(out)
    wanted = request.arguments()
    # The folder may satisfy the option without naming it: by the tokenizer's own rule, or an earlier version.
    if wanted["add_bos"] == (manifest.tokenizer.bos is not None):
        del wanted["add_bos"]
    recorded = _DEFAULTS | manifest.arguments
    # An earlier version recorded options without effect as they were given.
    unused = request.without_effect()
    changed = [key for key, value in wanted.items() if recorded[key] != value and key not in unused]
    if changed:
        key = changed[0]
        raise UserError(
            f"--out {out} was prepared with {key}={recorded[key]!r}, not {wanted[key]!r}; "
            "choose another --out, or add --overwrite"
        )
    for split in manifest.splits:
        for name, expected in manifest.files(split).items():
            file = out / name
            if not file.is_file() or FileRecord.of(file) != expected:
                raise UserError(
                    f"{file} is missing or changed since it was prepared; add --overwrite to make it again"
                )
    try:
        verify_tokenizer(out, manifest)
    except UserError as error:
        raise UserError(f"--out {out} {error}; add --overwrite to make it again") from None


@contextmanager
def atomic_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling folder that is renamed to `out` at the end, or deleted on failure.

    Raises UserError if another process has made `out` meanwhile, unless `overwrite`.
    """
    out = out.resolve()  # replace a link's target, not the link
    # Not a process id: processes of several machines or containers may write here.
    suffix = uuid4().hex[:8]
    folder, replaced = (out.with_name(f".{out.name}.{kind}-{suffix}") for kind in ("partial", "replaced"))
    folder.mkdir(parents=True)
    try:
        yield folder
        if overwrite and out.exists():
            out.rename(replaced)
        try:
            folder.rename(out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise UserError(f"{out} was made by another process meanwhile; name another folder") from None
    finally:
        if replaced.exists() and not out.exists():  # it ends between the two renames
            replaced.rename(out)
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _report_leftovers(out: Path, console: Console) -> None:
    """Report hidden folders, possibly large, that killed processes could not delete."""
    for folder in out.resolve().parent.glob(f".{escape(out.name)}.partial-*"):
        console.print(
            f"{folder} belongs to another `megakernel prepare`; delete it if none is running", soft_wrap=True
        )


def source_kind(spec: Sequence[str]) -> str | None:
    """`stdlib`, `hf`, `task` or one of BENCHMARKS, as `--source SPEC...` says; None for files and directories."""
    name, colon, _ = spec[0].partition(":")
    is_named = list(spec) == ["stdlib"] or name in BENCHMARKS or (colon and name in (HUB, "task"))
    return name if is_named and len(spec) == 1 else None


def open_source(
    spec: list[str],
    *,
    columns: Columns = TEXT,
    split: str = "train",
    include: Sequence[str] = (),
    seed: int = 0,
    workers: int = 1,
) -> DocumentSource:
    """The source that `--source SPEC...` names.

    `stdlib`, `hf:NAME[:CONFIG]`, `task:NAME[:key=value,...]`, what `open_benchmark` knows, or files and directories.

    `stdlib` with labels: its functions, labeled by package. include: name patterns for files inside directories; empty
    matches all. seed, workers: of generated tasks. Raises UserError for a missing path, a directory without a matching
    file, labels or conversations that are not in tables, and as `open_benchmark` does.
    """
    kind = source_kind(spec)
    if columns.chat and kind not in (None, HUB):
        raise _no_conversations(spec[0])
    if kind == "stdlib":
        description = {"kind": "stdlib", "python": ".".join(map(str, sys.version_info[:3]))}
        if columns.label is not None:
            return library_source(columns, description)
        return _file_source(library_files(), columns, description)
    if kind == HUB:
        return hub_source(spec[0], split, columns)
    if kind is not None:
        if columns.label is not None:
            raise UserError(
                f"--labels {columns.label} is a column of tables, and {spec[0]} is not a table; leave it out"
            )
        # Many imports that few commands need.
        from data_pipeline.benchmark_tasks import open_benchmark
        from data_pipeline.synthetic.source import TaskSource

        if kind == "task":
            return TaskSource.from_spec(spec[0].removeprefix("task:"), seed)
        return open_benchmark(spec[0], seed, workers)
    paths = [Path(path) for path in spec]
    files = [file for path in paths for file in _find_files(path, include)]
    return _file_source(files, columns, {"kind": "files", "paths": [str(path.resolve()) for path in paths]})


def _no_conversations(source: object) -> UserError:
    return UserError(
        f"--chat reads tables of conversations, and {source} is not a table; give hf:NAME, or files that end in "
        f"{', '.join(TABLES)}"
    )


def _file_source(files: list[Path], columns: Columns, description: dict[str, Any]) -> Files:
    # Besides .arrow files, such a folder holds only metadata, which would be read as text.
    if arrow := next((file for file in files if file.suffix == ".arrow"), None):
        raise UserError(
            f"--source {arrow} is what `save_to_disk` of `datasets` writes, and is not read; write the dataset with "
            "its `to_parquet`"
        )
    endings = tuple(TABLES) if columns.chat else (*TABLES, TSV)
    plain = next((file for file in files if not file.name.lower().endswith(endings)), None)
    if plain is not None and columns.chat:
        raise _no_conversations(plain)
    if plain is not None and columns.label is not None:
        raise UserError(
            f"--labels {columns.label} is a column of tables and {plain} is not a table; "
            f"give files that end in {', '.join(endings)}, or choose them with --include"
        )
    return Files(files, columns, description)


def _find_files(path: Path, include: Sequence[str]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"--source {path} does not exist; give files, a directory, hf:NAME or stdlib alone")
    if _is_prepared(path):
        raise UserError(
            f"--source {path} is a prepared folder and no text; list it in data.train, or give its sources"
        )
    files = [
        file
        for file in sorted(_visible_files(path))
        if file.is_file() and (not include or any(fnmatch(file.name, pattern) for pattern in include))
    ]
    if not files:
        wanted = f" that matches --include {' '.join(include)}" if include else ""
        raise UserError(f"--source {path} holds no file{wanted}; give another directory or pattern")
    return files


def _visible_files(directory: Path) -> Iterator[Path]:
    """What a directory holds at any depth besides directories, without hidden ones, prepared ones and `lost+found`.

    A link to a directory elsewhere is followed, once; one to a part of `directory` leads to nothing new, and one to
    what contains it would lead in a circle. Raises UserError for what cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise UserError(
            f"--source {error.filename} cannot be read: {error.strerror}; make it readable, or name only what is"
        ) from None

    root, followed = directory.resolve(), set[Path]()

    def leads_on(folder: Path) -> bool:
        if folder.name.startswith(".") or folder.name == "lost+found":  # the file system's own
            return False
        if _is_prepared(folder):
            _log.warning("%s is a prepared folder and is not read", folder)
            return False
        if not folder.is_symlink():
            return True
        target = folder.resolve()
        if target in followed or target.is_relative_to(root) or root.is_relative_to(target):
            return False
        followed.add(target)
        return True

    for parent, folders, names in os.walk(directory, onerror=refuse, followlinks=True):
        folders[:] = [name for name in sorted(folders) if leads_on(Path(parent, name))]
        yield from (Path(parent, name) for name in names if not name.startswith("."))
