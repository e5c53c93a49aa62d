"""Megatron's own token files as corpora: PREFIX.bin and PREFIX.idx, which its `preprocess_data.py` writes.

They name neither their tokenizer nor a validation split. On first use all of them is read once, and what a prepared
folder knows about its files is written to a folder beside them, PREFIX.megakernel: a manifest, the tokenizer and, by
default, the sample indices.
"""

import hashlib
import logging
import shutil
import time
from pathlib import Path
from uuid import uuid4

import numpy as np

from data_pipeline import tokenizers
from data_pipeline.manifest import FILE, FileRecord, Manifest, SplitRecord, TokenizerRecord
from data_pipeline.token_files import DTYPE_NAMES, INDEX_HEADER, INDEX_MAGIC, TokenFile, token_file
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.verification import TOKEN_TYPES, LargestId, is_writable, user_cache, verify_index
from megakernel.config.data import Data
from megakernel.config.errors import UserError, report_write_errors

_log = logging.getLogger(__name__)

SPLIT = "train"
"""Name of the only split of such files, whatever they are used for."""

_LEGACY_MAGIC = b"TNTIDX\x00\x00"


_AGAIN = "copy both files again, or run Megatron's preprocess_data.py again"


def is_prefix(path: Path) -> bool:
    """Whether `path` is the prefix of token files."""
    return not path.is_dir() and (token_file(path, "idx").is_file() or token_file(path, "bin").is_file())


def home(prefix: Path, data: Data) -> Path:
    """The folder of the manifest, the tokenizer and the indices: beside the files, if that can be written.

    Else it is in data.index_cache or the user's cache. Raises UserError without any of them.
    """
    beside = prefix.with_name(f"{prefix.name}.megakernel")
    if (beside / FILE).is_file() or is_writable(prefix.parent):
        return beside
    name = f"{prefix.name}-{hashlib.sha256(str(prefix.resolve()).encode()).hexdigest()[:16]}"
    if data.index_cache is not None:
        return data.index_cache / name
    try:
        return user_cache() / "corpora" / name
    except RuntimeError:
        raise UserError(
            f"{prefix.parent} is read-only, and there is no home folder for the manifest of {prefix.name}; set "
            "data.index_cache to a writable folder"
        ) from None


def open_files(key: str, prefix: Path, data: Data, read: bool) -> tuple[Path, Manifest]:
    """Check token files; returns the folder for their manifest, and the manifest.

    key: the configuration key of the prefix, for errors. read: make a missing manifest, for which all of the files is
    read; otherwise the result then lacks checksums. Raises UserError for files that are incomplete, of another format,
    or of another tokenizer than data.tokenizer.
    """
    folder, spec = home(prefix, data), data.tokenizer
    if spec is None:
        if (prefix.parent / FILE).is_file():
            raise UserError(
                f"{key}={prefix} is a split of the prepared folder {prefix.parent}; name the folder"
            )
        raise UserError(
            f"{key}={prefix} are token files of Megatron, which do not name their tokenizer; set data.tokenizer to the "
            "one that made them: byte, or a Hugging Face tokenizer's folder or hub name"
        )
    if spec == "words" or spec.partition(":")[0] == "bpe":
        raise UserError(
            f"data.tokenizer={spec} would have to be trained, but {prefix} already is tokens; give the tokenizer that "
            "made them"
        )
    token_type, sequences, bounds = _check_index(key, prefix)
    stats = {kind: token_file(prefix, kind).stat() for kind in ("bin", "idx")}
    seen = {kind: [stat.st_size, stat.st_mtime_ns] for kind, stat in stats.items()}
    identity = {"tokenizer": spec, **seen}
    if (folder / FILE).is_file():
        manifest = Manifest.read(folder)
        if manifest.arguments == identity:
            return folder, manifest
        if read:
            _log.warning("%s or its tokenizer has changed since it was first used, and is read again", prefix)
    tokenizer = tokenizers.make(spec, iter(()))
    if read:
        record = _read_all(key, prefix, token_type, tokenizer, spec)
    else:
        none = FileRecord(size=0, sha256="")
        tokens = stats["bin"].st_size // TOKEN_TYPES[token_type].itemsize
        record = SplitRecord(documents=bounds - 1, tokens=tokens, bytes=None, bin=none, idx=none)
    manifest = Manifest(
        source={"kind": "megatron", "prefix": str(prefix.resolve()), "sequences": sequences},
        arguments=identity,
        tokenizer=TokenizerRecord(
            kind=tokenizer.kind,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            hash=tokenizer.hash,
            bos=tokenizer.bos if tokenizer.add_bos else None,
        ),
        splits={SPLIT: record},
        skipped={},
        versions={},
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    if read:
        with report_write_errors("data.index_cache", folder):
            _write(folder, manifest, tokenizer)
    return folder, manifest


def _check_index(key: str, prefix: Path) -> tuple[int, int, int]:
    """Type code, number of sequences and of document bounds of an index that fits its token file."""

    def refuse(reason: str, remedy: str) -> UserError:
        return UserError(f"{key}={prefix}: {prefix.name}.{reason}; {remedy}")

    for kind in ("idx", "bin"):
        if not token_file(prefix, kind).is_file():
            raise refuse(f"{kind} does not exist", "give the prefix of both files")
    index = token_file(prefix, "idx")
    with index.open("rb") as stream:
        header = stream.read(INDEX_HEADER.size)
    if header.startswith(_LEGACY_MAGIC):
        raise refuse("idx is of Megatron's legacy format (TNTIDX), which is not read", _AGAIN)
    magic, version, token_type, sequences, bounds = INDEX_HEADER.unpack(header.ljust(INDEX_HEADER.size))
    if magic != INDEX_MAGIC:
        raise refuse("idx is no index of Megatron (MMIDIDX)", "give the prefix of a .bin and a .idx file")
    if version != 1:
        raise refuse(f"idx is of version {version}, and only version 1 is read", _AGAIN)
    if token_type not in TOKEN_TYPES:
        name = DTYPE_NAMES.get(token_type, f"unknown type {token_type}")
        known = ", ".join(DTYPE_NAMES[code] for code in TOKEN_TYPES)
        raise refuse(f"bin holds {name} numbers, no token ids", f"give files of {known}")
    expected = INDEX_HEADER.size + 12 * sequences + 8 * bounds
    if (size := index.stat().st_size) == expected + sequences:
        raise refuse(
            "idx has a mode for each sequence (multimodal), which is not read", "give files of text alone"
        )
    if size != expected:
        raise refuse(f"idx has {size} bytes, but its header says {expected}", _AGAIN)
    if bounds < 2:
        raise refuse("idx has no documents", _AGAIN)
    return token_type, sequences, bounds


def _read_all(key: str, prefix: Path, token_type: int, tokenizer: Tokenizer, spec: str) -> SplitRecord:
    """Read both files: their checksums, counts and ids. Sets the tokenizer's `add_bos` to that of the documents."""
    dtype = TOKEN_TYPES[token_type]
    largest, ends = LargestId(dtype), _Count(dtype, tokenizer.eod)
    index, size = FileRecord.of(token_file(prefix, "idx")), token_file(prefix, "bin").stat().st_size
    try:
        verify_index(token_file(prefix, "bin"), dtype.itemsize)
    except UserError as error:
        raise UserError(f"{key}={prefix} {error}; {_AGAIN}") from None
    documents = TokenFile(prefix)
    _log.warning("reading %s once, for its manifest (%.1f GB)", prefix, size / 1e9)

    def look(chunk: bytes) -> None:
        largest(chunk)
        ends(chunk)

    tokens = FileRecord.of(token_file(prefix, "bin"), look)
    if largest.id >= tokenizer.vocab_size:
        raise UserError(
            f"{key}={prefix} holds the id {largest.id}, but data.tokenizer={spec} has {tokenizer.vocab_size} ids; give "
            "the tokenizer that made it"
        )
    firsts, lasts = documents.edges()
    tokenizer.add_bos = tokenizer.bos not in (None, tokenizer.eod) and bool((firsts == tokenizer.bos).all())
    if open_ended := int((lasts != tokenizer.eod).sum()):
        _log.warning(
            "%d of %d documents of %s do not end with the tokenizer's end-of-document token %d; a model learns there "
            "to end no text (Megatron's preprocess_data.py has --append-eod)",
            open_ended,
            len(documents),
            prefix,
            tokenizer.eod,
        )
    count = size // dtype.itemsize
    # A tokenizer of bytes has one token per byte; for others the text would have to be decoded.
    text_bytes = count - ends.count if tokenizer.kind == "byte" else None
    return SplitRecord(documents=len(documents), tokens=count, bytes=text_bytes, bin=tokens, idx=index)


def _write(folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Write the tokenizer, and the manifest last: it makes them count."""
    folder.mkdir(parents=True, exist_ok=True)
    staged, kept = folder / f"tokenizer.partial-{uuid4().hex[:8]}", folder / "tokenizer"
    try:
        tokenizer.save(staged)
        shutil.rmtree(kept, ignore_errors=True)
        staged.rename(kept)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    partial = folder / f"manifest.partial-{uuid4().hex[:8]}"
    partial.mkdir()
    try:
        manifest.write(partial)
        (partial / FILE).replace(folder / FILE)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Count:
    """Callable that counts one id in all chunks."""

    def __init__(self, dtype: np.dtype, wanted: int):
        self.count = 0
        self._dtype, self._wanted = dtype, wanted

    def __call__(self, chunk: bytes) -> None:
        whole = len(chunk) - len(chunk) % self._dtype.itemsize
        self.count += int((np.frombuffer(chunk[:whole], self._dtype) == self._wanted).sum())
