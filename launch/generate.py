"""`megakernel generate`: text from a trained model."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from launch.arguments import Number, add_run_arguments
from megakernel.config import UserError

HELP = "continue a prompt with a trained model"
EXAMPLE = "megakernel generate runs/demo --prompt 'def main' --max-new-tokens 200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue; '' begins a new document")
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="file with a text of any length, read as it is, or - for standard input; prints the continuation alone",
    )
    prompt.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='lines {"prompt": "..."}, or - for standard input; prints each line with its "continuation" added',
    )
    parser.add_argument(
        "--max-new-tokens",
        type=Number(int, most=1_000_000_000),
        default=200,
        metavar="N",
        help="default %(default)s",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest (default %(default)s)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: from all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest with this share (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the continuation, token by token, of a prompt behind it; of many a line each."""
    if args.prompts is not None:
        rows = _rows(args.prompts)
    else:
        text = args.prompt if args.prompt_file is None else _read("--prompt-file", args.prompt_file)
        rows = [{"prompt": text}]
    from megakernel.checkpoint.trained_run import student
    from megakernel.generation import Sampling, generate_texts

    texts = generate_texts(
        student(args.run_folder),
        [row["prompt"] for row in rows],
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(args.temperature, args.top_k, args.top_p),
        seed=args.seed,
        step=args.step,
    )
    for text, row in zip(texts, rows):
        if args.prompts is not None:
            print(json.dumps({**row, "continuation": "".join(text)}), flush=True)
            continue
        print(args.prompt or "", end="", flush=True)
        for piece in text:
            print(piece, end="", flush=True)
        print()
    return 0


def _read(option: str, name: str) -> str:
    """The text of a file, its line ends too, or of standard input."""
    try:
        return (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode()
    except (OSError, ValueError) as error:
        reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        raise UserError(f"{option} {name} {reason} ({error}); give a file of UTF-8 text, or -") from None


def _rows(name: str) -> list[dict[str, Any]]:
    """The objects in the lines of a file; empty ones are passed over."""
    rows = []
    for number, line in enumerate(_read("--prompts", name).split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = line
        if row is not None and not (isinstance(row, dict) and isinstance(row.get("prompt"), str)):
            raise UserError(f'--prompts {name}: line {number} has no prompt; write {{"prompt": "..."}}')
        rows += [] if row is None else [row]
    if not rows:
        raise UserError(f'--prompts {name} holds no line; write {{"prompt": "..."}} for each prompt')
    return rows
