"""`megakernel prepare`: tokenizes text into a folder that training reads."""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

from data_pipeline.accounting import FEW, MAX_BAD_ROWS
from data_pipeline.prepare import PrepareRequest, prepare
from launch.arguments import Number
from launch.local import exit_with, handle_signals
from launch.messages import console

HELP = "tokenize text into a folder that training reads"
MESSAGES = "messages"
"""Column of conversations in chat datasets, the default text key with --chat."""

_TEXT = PrepareRequest.model_fields["text_key"].default

EXAMPLE = "megakernel prepare --source stdlib --tokenizer byte --out data/stdlib"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""

    def add(name: str, help_suffix: str = "", **options: Any) -> None:
        field = PrepareRequest.model_fields[name]
        text = field.description or ""
        default = {} if field.is_required() else {"default": field.default}
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            **{"help": text[0].lower() + text[1:].rstrip(".") + help_suffix, **default, **options},
        )

    add("source", nargs="+", required=True, metavar="SOURCE")
    add("tokenizer", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    add("validation_fraction", " (default %(default)s)", type=float)
    add("seed", type=Number(int, 0))
    add("text_key", f" (default {_TEXT}; with --chat {MESSAGES})", metavar="KEY", default=None)
    add("chat", action="store_true")
    add(
        "chat_template",
        type=Path,
        metavar="FILE",
        help="Jinja template instead of the tokenizer's own; runs and exports keep it with the tokenizer",
    )
    add("labels", metavar="KEY")
    add("second_text_key", metavar="KEY")
    add("split")
    add("include", nargs="+", metavar="GLOB")
    add("part", metavar="I/N")
    add("max_documents", type=Number(int, 1))
    parser.add_argument(
        "--workers",
        type=Number(int, 1, 1_000),
        default=os.cpu_count() or 1,
        help="number of tokenizing processes (default %(default)s)",
    )
    add("add_bos", action=argparse.BooleanOptionalAction)
    add("eos_token", metavar="TOKEN")
    add("special_tokens", choices=["text", "parse"])
    parser.add_argument(
        "--max-bad-rows",
        type=Number(float, 0, 1),
        metavar="SHARE",
        help="rows that cannot be read are skipped and named; stop if more than this share of them are (default "
        f"{MAX_BAD_ROWS:g}, but {FEW} are allowed beside as many good ones)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a folder prepared with other arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the folder. Raises UserError for what the user can fix."""
    fields = {name: getattr(args, name) for name in PrepareRequest.model_fields}
    key = args.text_key or (MESSAGES if args.chat else _TEXT)
    request = PrepareRequest(**fields | {"text_key": key})
    stderr = console(stderr=True)
    # An orderly exit: a prepare that a scheduler or a closed terminal ends removes what no later one can use.
    with handle_signals((signal.SIGTERM, signal.SIGHUP), exit_with):
        manifest = prepare(
            request,
            args.out,
            workers=args.workers,
            overwrite=args.overwrite,
            console=stderr,
            max_bad_rows=args.max_bad_rows,
        )
    if manifest is None:
        stderr.print(f"{args.out} is already prepared with these arguments; nothing to do", soft_wrap=True)
    return 0
