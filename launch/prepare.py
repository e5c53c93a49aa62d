"""`megakernel prepare`: text to a folder that training reads."""

import argparse
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

from data_pipeline.manifest import Manifest
from data_pipeline.prepare import PrepareRequest, prepare
from launch.arguments import Number
from launch.local import handled
from launch.messages import console

HELP = "tokenize text into a folder that training reads"
MESSAGES = "messages"
"""Column that holds conversations, as datasets of chats name it."""

_TEXT = PrepareRequest.model_fields["text_key"].default

EXAMPLE = "megakernel prepare --source stdlib --tokenizer byte --out data/stdlib"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""

    def add(name: str, more: str = "", **how: Any) -> None:
        field = PrepareRequest.model_fields[name]
        text = field.description or ""
        default = {} if field.is_required() else {"default": field.default}
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            **{"help": text[0].lower() + text[1:].rstrip(".") + more, **default, **how},
        )

    add("source", nargs="+", required=True, metavar="SOURCE")
    add("tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    add("validation_fraction", " (default %(default)s)", type=float)
    add("seed", type=Number(int, 0))
    add("text_key", f" (default {_TEXT}; with --chat {MESSAGES})", metavar="KEY", default=None)
    add("chat", action="store_true")
    add(
        "chat_template",
        type=Path,
        metavar="FILE",
        help="Jinja in place of the tokenizer's own template; it goes with the tokenizer into runs and exports",
    )
    add("labels", metavar="KEY")
    add("second_text_key", metavar="KEY")
    add("split")
    add("include", nargs="+", metavar="GLOB")
    add("max_documents", type=Number(int, 1))
    parser.add_argument(
        "--workers",
        type=Number(int, 1, 1_000),
        default=os.cpu_count() or 1,
        help="processes that tokenize (default %(default)s)",
    )
    add("add_bos", action=argparse.BooleanOptionalAction)
    parser.add_argument("--overwrite", action="store_true", help="replace a folder prepared in another way")


def run(args: argparse.Namespace) -> int:
    """Prepare the folder; 0 when it is there. Raises UserError for what the user can mend."""
    given = {name: getattr(args, name) for name in PrepareRequest.model_fields}
    key = args.text_key or (MESSAGES if args.chat else _TEXT)
    request = PrepareRequest(**given | {"text_key": key})
    stderr = console(stderr=True)
    # An orderly exit, so that a prepare ended by a scheduler or with its terminal leaves no half-made folder.
    with handled((signal.SIGTERM, signal.SIGHUP), _exit):
        manifest = prepare(request, args.out, workers=args.workers, overwrite=args.overwrite, console=stderr)
    if manifest is None:
        said = f"{args.out} is already prepared with these arguments; nothing to do"
    else:
        said = _summary(args.out, manifest)
    stderr.print(said, soft_wrap=True)
    return 0


def _exit(signum: int) -> NoReturn:
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
