"""Documents to a prepared folder: Megatron token files per split, the tokenizer, and a manifest."""

import hashlib
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
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
from data_pipeline.accounting import (
    BadRows,
    Counts,
    check_bad_rows,
    count_left_out,
    describe_bad_rows,
    describe_files,
)
from data_pipeline.chat import ChatTemplate
from data_pipeline.document import DOCUMENTS_PER_PAIR, Columns, Document
from data_pipeline.encoding import HASHES, content_hash, encode, parallel_map
from data_pipeline.files import recognize
from data_pipeline.labels import write_labels
from data_pipeline.manifest import LabelsRecord, Manifest, SourcePart, SplitRecord, TokenizerRecord
from data_pipeline.partial_folder import PartialFolder, resumable_folder
from data_pipeline.source_names import is_prepared, open_source, source_kind
from data_pipeline.sources import BENCHMARKS, GETTEXT, HUB, DocumentSource, is_unicode
from data_pipeline.token_files import TokenFile, TokenWriter, token_dtype
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.verification import check_unchanged
from megakernel.config.errors import UserError, first_line, report_write_errors


class PrepareRequest(BaseModel):
    """The options that determine a prepared folder's content; a field's docstring is its option's help."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    source: list[str]
    """Directories and files, compressed or not (JSON lines under any name, JSON arrays, .csv, .tsv, Parquet and Arrow
    hold a document per row; any other text is one document; a directory with tables is read as tables, and the rest is
    listed as left out: docs/data.md), hf:NAME[:CONFIG] for a dataset of the hub, stdlib (this Python's library; with
    --labels package, functions of eight of its packages), gettext:LANGUAGE[:FOLDER] (pairs of English messages of
    installed programs and their translations, such as gettext:de; FOLDER is /usr/share/locale),
    task:NAME[:key=value,...] for generated examples (docs/evaluation.md), or a labeled task (docs/benchmarks.md):
    lra:listops, lra:pathfinder and sparsity are generated (options: lra:listops:train=1000,max_length=200);
    lra:listops, lra:text, lra:spam, lra:retrieval, lra:image and glue:TASK are read from their published files
    (lra:listops:FOLDER) or the hub (glue:cola:hf:NAME:CONFIG)."""

    tokenizer: str
    """Byte, bpe:SIZE (trained on the first 100 million characters), words (split at spaces), pixels (images), or a
    Hugging Face directory or hub name."""

    validation_fraction: float = 0.02
    """Share of the documents held out for validation, by a hash of their text; at least one document, unless 0."""

    seed: int = 0
    """Seed of the validation split, and of generated examples (those of a task:NAME with seed=S have S)."""

    text_key: str = "text"
    """Column with the text of a row; content.text is column text inside column content."""

    labels: str | None = None
    """Column with the class of a row, for a classifier."""

    second_text_key: str | None = None
    """Column with a second text: the translation of the first, for an encoder-decoder (such rows are pairs); with
    --labels, one to compare with the first."""

    split: str = "train"
    """Split of a hub dataset to read."""

    include: tuple[str, ...] = ()
    """File name patterns to read inside directories ('*.py'), both tables and texts."""

    part: str | None = None
    """Only part I (0 to N - 1) of N parts of the files, of about the same size, so that the jobs of an array prepare
    one source (--part %%a/64); `megakernel merge` joins the parts."""

    max_documents: int | None = None
    """Read only the first documents."""

    add_bos: bool | None = None
    """Begin every document with the tokenizer's beginning-of-sequence token, or not (default: as the tokenizer
    itself does)."""

    eos_token: str | None = None
    """Token that ends documents, for a Hugging Face tokenizer that does not say which, or another than its own."""

    special_tokens: Literal["text", "parse"] = "text"
    """What a special token's name in a text, such as <|fim_prefix|>, becomes: `text` encodes its characters, `parse`
    reads the token, for texts that were formatted for the tokenizer and come from nobody else."""

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

    @property
    def is_pairs(self) -> bool:
        """Whether documents are pairs of a text and its translation."""
        has_two = self.second_text_key is not None and self.labels is None
        return has_two or source_kind(self.source) == GETTEXT

    @property
    def part_numbers(self) -> tuple[int, int]:
        """The numbers I and N of --part I/N, which is given."""
        number, count = map(int, (self.part or "").split("/"))
        return number, count

    def arguments(self) -> dict[str, Any]:
        """The options as JSON values; paths of sources are absolute, so that the current folder does not matter."""
        if source_kind(self.source) is None:
            source = [str(Path(path).resolve()) for path in self.source]
        else:
            source = [_with_absolute_path(self.source[0])]
        template = None if self.chat_template is None else digest(self.read_template() or "")
        # Without parts it is absent, as in the manifests of earlier versions.
        return {
            **self.model_dump(exclude={"part"} if self.part is None else None),
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
        is_table = kind is None and any(_is_table(Path(path)) for path in self.source)
        reasons = {}
        if kind != HUB:
            reasons["split"] = f"is of a hub dataset, and {source} is not hf:NAME"
        if not names_folder:
            reasons["include"] = f"chooses files of directories, and {source} names none"
        if kind in BENCHMARKS:
            reasons["validation_fraction"] = f"splits documents, and {source} is already split"
        if kind == GETTEXT:
            reasons["part"] = (
                f"chooses files, and {source} reads all catalogs, so that each pair is there once"
            )
        elif kind not in (None, "stdlib"):
            reasons["part"] = f"chooses files, and {source} has none"
        # With labels or conversations other errors say what is no table.
        if not (kind == HUB or names_folder or is_table or self.labels is not None or self.chat):
            for key in ("text_key", "second_text_key"):
                reasons[key] = f"is a column of tables, and {source} has none"
        return reasons

    def check(self) -> None:
        """UserError for invalid options or combinations of them."""
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"--validation-fraction {self.validation_fraction} must lie in [0, 1)")
        if self.second_text_key is not None and self.chat:
            raise UserError(
                f"--second-text-key {self.second_text_key}: conversations have no second text; leave out one of it and "
                "--chat"
            )
        if self.second_text_key == self.text_key:
            raise UserError(
                f"--second-text-key {self.second_text_key} is the column of the first text, too; name another one with "
                "it or with --text-key"
            )
        if self.chat_template is not None and not self.chat:
            raise UserError(f"--chat-template {self.chat_template} needs conversations; add --chat")
        if self.chat and self.labels is not None:
            raise UserError(
                f"--labels {self.labels}: conversations have no classes; leave out --labels or --chat"
            )
        if self.special_tokens == "parse":
            if self.chat:
                raise UserError(
                    "--special-tokens parse: the chat template writes those of conversations, and messages are text; "
                    "leave it out"
                )
            if tokenizers.is_own(self.tokenizer):
                raise UserError(
                    f"--special-tokens parse: --tokenizer {self.tokenizer} has no special token that a text may name; "
                    "leave it out, or give a Hugging Face tokenizer"
                )
        if self.chat and self.add_bos is not None:
            raise UserError("--add-bos: the chat template says how conversations begin; leave it out")
        self._check_part()
        for name, reason in self.without_effect().items():
            if (value := getattr(self, name)) != _DEFAULTS[name]:
                text = " ".join(value) if isinstance(value, tuple) else value
                raise UserError(f"--{name.replace('_', '-')} {text} {reason}; leave it out")
        for key, value in self.arguments().items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not is_unicode(text):
                    raise UserError(f"--{key.replace('_', '-')} {text!a} is not UTF-8; rename it")

    def _check_part(self) -> None:
        if self.part is None:
            return
        if (
            not re.fullmatch(r"\d{1,6}/\d{1,6}", self.part, re.ASCII)
            or not self.part_numbers[0] < self.part_numbers[1]
        ):
            raise UserError(f"--part {self.part} is no part; write I/N, with I from 0 to N - 1")
        if tokenizers.is_trained(self.tokenizer):
            raise UserError(
                f"--part {self.part}: --tokenizer {self.tokenizer} would be another one for each part; prepare some of "
                "the text with it, and give the tokenizer/ of that folder"
            )
        if self.labels is not None:
            raise UserError(
                f"--part {self.part}: --labels {self.labels}: `megakernel merge` joins no labelled folders; prepare "
                "them at once"
            )
        if self.max_documents is not None:
            raise UserError(
                f"--part {self.part}: --max-documents {self.max_documents} counts those of the whole source; leave "
                "it out"
            )


_DEFAULTS = {name: field.default for name, field in PrepareRequest.model_fields.items()}
"""Values of options that are absent from manifests of earlier versions."""


_BEFORE_PATH = re.compile(
    r"task:.*?[:,]filler=(?!(?:sentences|validation)(?:,|$))|(?:lra|glue):[^:]*:(?!hf:|[^,]*=|$)|gettext:[^:]*:(?!$)"
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


def _is_table(path: Path) -> bool:
    """Whether a file holds rows, or may: another error says what is wrong with one that cannot be read."""
    try:
        return recognize(path).is_table
    except (OSError, UserError):
        return True


def prepare(
    request: PrepareRequest,
    out: Path,
    *,
    workers: int,
    overwrite: bool,
    console: Console,
    max_bad_rows: float | None = None,
) -> Manifest | None:
    """Prepare folder `out`; None if an equal request made it before and its files are intact.

    The folder appears complete or not at all. If the process is ended, the source files that it has finished are kept
    beside it, and the same request goes on from there. max_bad_rows: share of rows; None: see `check_bad_rows`.
    Says on the console what was read and what was left out. Raises UserError for what cannot be prepared, and for an
    existing folder with other content, unless `overwrite`.
    """
    request.check()
    with report_write_errors("--out", out):
        exists = out.exists()
    if exists and not is_prepared(out):  # never replace what prepare did not make
        raise UserError(
            f"--out {out} exists and is not a prepared folder; choose another --out, or remove it"
        )
    if exists and not overwrite:
        _check_same_request(request, out)
        return None
    source = _open(request, workers)
    source.max_bad_rows = max_bad_rows
    if source.endless and request.max_documents is None:
        raise UserError(
            f"--source {' '.join(request.source)} has no end; say how many with --max-documents N"
        )
    tokenizer = None
    if not tokenizers.is_trained(request.tokenizer):
        with console.status("tokenizer"):
            tokenizer = _made_tokenizer(request, iter(()))
            _set_template(tokenizer, request)
    identity = _identity(source, request, tokenizer)
    with (
        report_write_errors("--out", out),
        resumable_folder(out, identity, overwrite=overwrite, console=console) as partial_folder,
    ):
        folder = partial_folder.path
        if (saved := partial_folder.saved) is not None:
            source.start = Counts.model_validate(saved["counts"])
            console.print(
                f"goes on from {folder}: {source.start.files:,} of {source.description['files']:,} files are finished",
                soft_wrap=True,
            )
        with console.status("tokenizer"):
            if tokenizer is None:
                if saved is None:
                    train = partial(_train_tokenizer, request, workers, max_bad_rows)
                    list(parallel_map(train, [folder / "tokenizer"], 1))
                tokenizer = tokenizers.load(folder / "tokenizer")
                _set_template(tokenizer, request)
            tokenizer.save(folder / "tokenizer")
        source.set_tokenizer(tokenizer)
        splits, labels, counts = _write_splits(source, request, tokenizer, workers, partial_folder, console)
        left_out = count_left_out(source.files, counts.left_out)
        manifest = Manifest(
            source={**source.description, **({"left_out": left_out} if left_out else {})},
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
            pairs=request.is_pairs,
            chat_template=digest(tokenizer.chat_template or "") if request.chat else None,
            skipped=dict(counts.skipped),
            versions=_versions(),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        manifest.write(folder)
    for line in _summary(out, manifest, source, counts):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return manifest


def _versions() -> dict[str, str]:
    """What may change tokens and rows; of packages that are not installed nothing was used."""
    versions = {}
    for name in ("megatron-core", "datasets", "tokenizers", "transformers"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _made_tokenizer(request: PrepareRequest, texts: Iterator[str]) -> Tokenizer:
    return tokenizers.make(request.tokenizer, texts, add_bos=request.add_bos, eos_token=request.eos_token)


def _train_tokenizer(request: PrepareRequest, workers: int, max_bad_rows: float | None, folder: Path) -> None:
    """Train and save the tokenizer, in a process of its own: the trainer lets no signal be handled, for hours maybe."""
    source = _open(request, workers)
    source.max_bad_rows = max_bad_rows
    _made_tokenizer(
        request, (text for document in _documents(source, request) for text in document.texts)
    ).save(folder)


def _set_template(tokenizer: Tokenizer, request: PrepareRequest) -> None:
    if request.chat:
        tokenizer.chat_template = request.read_template() or tokenizer.chat_template
        ChatTemplate(tokenizer)  # fails now if there is none


def _open(request: PrepareRequest, workers: int) -> DocumentSource:
    source = open_source(
        request.source,
        columns=request.columns,
        split=request.split,
        include=request.include,
        seed=request.seed,
        workers=workers,
    )
    return source if request.part is None else source.part(*request.part_numbers)


def _identity(
    source: DocumentSource, request: PrepareRequest, tokenizer: Tokenizer | None
) -> dict[str, Any] | None:
    """What must be equal for a later process to go on where this one ends; None if none can."""
    if source.identity is None:
        return None
    return {
        "arguments": request.arguments(),
        "files": source.identity,
        "tokenizer": tokenizer and [tokenizer.hash, digest(tokenizer.chat_template or "")],
        "versions": _versions(),
        "python": sys.version,
    }


def _summary(out: Path, manifest: Manifest, source: DocumentSource, counts: Counts) -> Iterator[str]:
    bos = manifest.tokenizer.bos
    bos_note = "" if bos is None else f", documents begin with token {bos} (BOS)"
    yield f"{out}: tokenizer {manifest.tokenizer.kind}, vocabulary {manifest.tokenizer.vocab_size:,}{bos_note}"
    if (part := SourcePart.of(manifest)) is not None:
        yield f"  part {part} of the source: {source.description['files']:,} files"
    for name, split in manifest.splits.items():
        size = f"{(split.bytes or 0) / 1e6:,.1f} MB"
        answers = f", {split.scored.tokens:,} tokens of answers" if split.scored else ""
        if manifest.pairs:
            lengths = TokenFile(out / name).sequence_lengths
            of_source, of_target = (
                int(lengths[side::DOCUMENTS_PER_PAIR].sum(dtype=np.int64)) for side in (0, 1)
            )
            tokens = f"{of_source:,} source tokens, {of_target:,} target tokens"
            yield f"  {name}: {split.documents // DOCUMENTS_PER_PAIR:,} pairs, {tokens}, {size}"
        else:
            yield f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, {size}{answers}"
    if manifest.labels is not None:
        classes = ", ".join(map(str, manifest.labels.classes))
        yield f"  classes: {classes}" if classes else "  labels are numbers"
    if manifest.arguments["special_tokens"] == "parse":
        found = [f"{name} {count:,}" for name, count in counts.special_tokens.most_common(_MOST_SPECIAL)]
        more = len(counts.special_tokens) - len(found)
        listed = ", ".join(found) + (f" and {more} more" if more else "")
        yield f"  special tokens in texts: {listed or 'none'}"
    for reason, count in manifest.skipped.items():
        skipped = ("pair" if manifest.pairs else "document") + "s" * (count > 1)
        yield f"  skipped {count:,} {skipped}: {reason}"
    for line in describe_bad_rows(counts):
        yield f"    {line}"
    for line in describe_files(source.files, counts.left_out):
        yield f"  {line}"


_MOST_SPECIAL = 10
"""Special tokens that are counted by name."""


def _documents(source: DocumentSource, request: PrepareRequest) -> Iterator[Document]:
    most = request.max_documents
    return islice(iter(source), most if most is None else max(0, most - source.start.documents))


# Large enough that pickling is cheap compared with encoding, small enough that workers' batches fit in memory.
_BATCH_CHARACTERS = 1_000_000

_SMALL_FILES = 30_000
"""Characters of files after which progress is saved at the end of one."""

_SHARE_OF_SAVING = 0.05
"""Of the time, at most; on a slow disk progress is saved less often."""


def _batches(
    source: DocumentSource, request: PrepareRequest, ends: "deque[Counts | None]"
) -> Iterator[list[Document]]:
    """Consecutive documents in lists of about a million characters.

    For each, `ends` gets what was read of the source up to its end if that is the end of a file, None otherwise.
    """
    batch: list[Document] = []
    characters = since_end = 0
    failure: UserError | None = None
    try:
        for document in _documents(source, request):
            is_first_of_file = source.counts.documents - 1 == source.finished.documents
            if is_first_of_file and since_end >= _SMALL_FILES:
                ends.append(source.finished)
                yield batch
                batch, characters, since_end = [], 0, 0
            length = sum(map(len, document.texts))
            batch.append(document)
            characters += length
            since_end += length
            if characters >= _BATCH_CHARACTERS:
                ends.append(None)
                yield batch
                batch, characters = [], 0
    except UserError as error:  # what was read before is kept
        failure = error
    if since_end:
        ends.append(source.finished if source.counts.documents == source.finished.documents else None)
        yield batch
    if failure is not None:
        raise failure


def _write_splits(
    source: DocumentSource,
    request: PrepareRequest,
    tokenizer: Tokenizer,
    workers: int,
    partial_folder: PartialFolder,
    console: Console,
) -> tuple[dict[str, SplitRecord], LabelsRecord | None, Counts]:
    """Encode and write every document.

    Returns the records of nonempty splits, that of the labels if any, and what was read and skipped.
    """
    folder, saved = partial_folder.path, partial_folder.saved or {}
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {
        name: TokenWriter(folder / name, dtype, state) for name, state in saved.get("splits", {}).items()
    }
    rejected = Counts.model_validate(saved.get("rejected", {}))
    ends: deque[Counts | None] = deque()
    save_from = 0.0
    with _progress(console) as progress:
        limits = [limit for limit in (source.total, request.max_documents) if limit is not None]
        documents = DOCUMENTS_PER_PAIR if request.is_pairs else 1
        task = progress.add_task(
            "pairs" if request.is_pairs else "documents", total=min(limits, default=None), tokens=0
        )
        bound = saved["bound"] if "bound" in saved else _validation_bound(source, request)
        parse = request.special_tokens == "parse"
        encoder_arguments = folder / "tokenizer", dtype.__name__, request.seed, bound, parse
        batches = _batches(source, request, ends)
        for splits in parallel_map(partial(encode, encoder_arguments), batches, workers):
            for split, encoded in splits.items():
                writer = writers.setdefault(split, TokenWriter(folder / split, dtype))
                writer.add(encoded)
                rejected.special_tokens += encoded.special_tokens
                for place, reason in encoded.rejected:
                    rejected.add_bad(*place, reason)
                    check_bad_rows(_sum(source.counts, rejected), source.max_bad_rows, at_end=False)
            end, now = ends.popleft(), time.monotonic()
            if end is not None and partial_folder.identity is not None and now >= save_from:
                state = {name: writer.save() for name, writer in writers.items()}
                read_rows, bad_rows = end.model_dump(mode="json"), rejected.model_dump(mode="json")
                partial_folder.save(
                    {"counts": read_rows, "rejected": bad_rows, "bound": bound, "splits": state}
                )
                save_from = time.monotonic() + (time.monotonic() - now) / _SHARE_OF_SAVING
            written = sum(writer.documents for writer in writers.values()) // documents
            read = written + source.skipped.total()
            progress.update(task, completed=read, tokens=sum(writer.tokens for writer in writers.values()))
    counts = _sum(source.counts, rejected)
    check_bad_rows(counts, source.max_bad_rows, at_end=True)
    records = {split: writer.finish() for split, writer in writers.items() if writer.documents}
    if not records:
        raise UserError(f"--source {' '.join(request.source)} holds no text; give files with text in them")
    if "train" not in records and request.part is None:
        raise UserError(
            f"--source {' '.join(request.source)} has no example to train on; give all of its files"
        )
    labels = {split: writers[split].labels for split in records}
    if not any(labels.values()):
        return records, None, counts
    classes, files = write_labels(folder, labels, source.classes)
    rows = records["train"].documents // len(labels["train"])
    return records, LabelsRecord(documents=rows, classes=classes, files=files), counts


def _sum(read: Counts, rejected: Counts) -> Counts:
    """What was read, with what workers counted: documents that they rejected, as bad rows, and special tokens."""
    total = read.model_copy(deep=True)
    total.documents -= rejected.bad_rows
    total.bad_rows += rejected.bad_rows
    total.skipped += rejected.skipped
    total.special_tokens += rejected.special_tokens
    for place, rows in rejected.bad.items():
        known = total.bad.setdefault(place, BadRows())
        known.count += rows.count
        known.first += rows.first
    return total


def _validation_bound(source: DocumentSource, request: PrepareRequest) -> float:
    """The `content_hash` below which documents are for validation: that fraction of all hashes.

    If few documents leave a split empty, the bound moves just far enough to give it one, but not for a part of a
    source: a document must be in the same split whatever part it is in. Reads documents only until both splits have
    one. Raises UserError if there are no two different documents.
    """
    bound = request.validation_fraction * HASHES
    if not bound or source.has_splits or request.part is not None:
        return bound
    smallest, largest = HASHES, -1
    for document in _documents(source, request):
        hashed = content_hash(document.content, request.seed)
        smallest, largest = min(smallest, hashed), max(largest, hashed)
        if smallest < bound <= largest:
            return bound
    if smallest == largest:
        raise UserError(
            f"--validation-fraction {request.validation_fraction} cannot split one document, or several "
            "of the same content (documents stay whole); give more documents, or set the fraction to 0 for no "
            "validation split"
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
    check_unchanged(out, manifest)
