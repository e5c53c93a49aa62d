"""`megakernel prepare`: text to a folder that training reads."""

import argparse
import os
import signal
import warnings
from dataclasses import fields
from pathlib import Path
from types import FrameType

from data_pipeline.manifest import Manifest
from data_pipeline.prepare import PrepareRequest, prepare
from launch.arguments import Number
from launch.messages import console

HELP = "tokenize text into a folder that training reads"
MESSAGES = "messages"
"""Column that holds conversations, as datasets of chats name it."""

EXAMPLE = "megakernel prepare --source stdlib --tokenizer byte --out data/stdlib"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--source",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="directories and files (.jsonl, .ndjson, .parquet and, with --labels, .tsv hold a document per row, any "
        "other UTF-8 file is one document), hf:NAME[:CONFIG] for a dataset of the hub, stdlib (this Python's library; "
        "with --labels package, functions of eight of its packages), task:NAME[:key=value,...], examples that are made "
        "here (docs/evaluation.md), or a labelled task (docs/benchmarks.md): lra:listops, lra:pathfinder, sparsity are "
        "made (options: lra:listops:train=1000,max_length=200); lra:listops, lra:text, lra:retrieval, lra:image and "
        "glue:TASK are read from their published files (lra:listops:FOLDER) or the hub (glue:cola:hf:NAME:CONFIG)",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="byte, bpe:SIZE (trained on the first 100 million characters), words (between spaces), pixels (images), "
        "or a Hugging Face directory or hub name",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=PrepareRequest.validation_fraction,
        help="share of the documents held out for validation (default %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=Number(int, 0),
        default=PrepareRequest.seed,
        help="which documents are held out, or made",
    )
    parser.add_argument(
        "--text-key",
        metavar="KEY",
        help=f"column that holds the text of a row (default {PrepareRequest.text_key}; with --chat {MESSAGES})",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="rows are conversations, lists of {role, content}: the tokenizer's chat template renders them, and only "
        "what the assistant wrote counts in the loss",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja in place of the tokenizer's own template; it goes with the tokenizer into runs and exports",
    )
    parser.add_argument(
        "--labels", metavar="KEY", help="column that holds the class of a row, for a classifier"
    )
    parser.add_argument(
        "--second-text-key",
        metavar="KEY",
        help="column with the document that the first is compared with (labelled rows only)",
    )
    parser.add_argument("--split", default=PrepareRequest.split, help="split of a hub dataset to read")
    parser.add_argument(
        "--include",
        nargs="+",
        default=[],
        metavar="GLOB",
        help="names of files to read inside directories ('*.py')",
    )
    parser.add_argument("--max-documents", type=Number(int, 1), help="read only the first documents")
    parser.add_argument(
        "--workers",
        type=Number(int, 1, 1_000),
        default=os.cpu_count() or 1,
        help="processes that tokenize (default %(default)s)",
    )
    parser.add_argument(
        "--add-bos",
        action=argparse.BooleanOptionalAction,
        help="begin every document with the tokenizer's beginning-of-sequence token, or with none (default: as the "
        "tokenizer itself begins a text)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a folder prepared in another way")


def run(args: argparse.Namespace) -> int:
    """Prepare the folder; 0 when it is there. Raises UserError for what the user can mend."""
    given = {field.name: getattr(args, field.name) for field in fields(PrepareRequest)}
    key = args.text_key or (MESSAGES if args.chat else PrepareRequest.text_key)
    request = PrepareRequest(**given | {"include": tuple(args.include), "text_key": key})
    stderr = console(stderr=True)
    # An orderly exit, so that a prepare ended by a scheduler or with its terminal leaves no half-made folder.
    ends = [end for end in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(end) != signal.SIG_IGN]
    previous = {end: signal.signal(end, _exit_on_term) for end in ends}
    try:
        with warnings.catch_warnings():
            # Megatron tells every process that imports it which GPU libraries are absent.
            warnings.filterwarnings("ignore", module=r"megatron\.")
            manifest = prepare(
                request, args.out, workers=args.workers, overwrite=args.overwrite, console=stderr
            )
    finally:
        for end, handler in previous.items():
            signal.signal(end, handler)
    if manifest is None:
        said = f"{args.out} is already prepared with these arguments; nothing to do"
    else:
        said = _summary(args.out, manifest)
    stderr.print(said, soft_wrap=True)
    return 0


def _exit_on_term(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _summary(out: Path, manifest: Manifest) -> str:
    bos = manifest.tokenizer.bos
    begun = "" if bos is None else f", documents begin with token {bos} (BOS)"
    lines = [
        f"{out}: tokenizer {manifest.tokenizer.kind}, vocabulary {manifest.tokenizer.vocab_size:,}{begun}"
    ]
    lines += [
        f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, {split.bytes / 1e6:,.1f} MB"
        + (f", {split.scored.tokens:,} tokens of answers" if split.scored else "")
        for name, split in manifest.splits.items()
    ]
    if manifest.labels is not None:
        classes = ", ".join(map(str, manifest.labels.classes))
        lines += [f"  classes: {classes}" if classes else "  labels are numbers"]
    lines += [
        f"  skipped {count:,} documents: {reason}" for reason, count in manifest.skipped.items() if count
    ]
    return "\n".join(lines)
