"""`megakernel generate`: text from a trained model."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.arguments import Number, add_model_arguments
from megakernel.config import UserError

HELP = "continue prompts, or answer messages, with a trained model"
EXAMPLE = "megakernel generate runs/demo --prompt 'def main' --max-new-tokens 200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue; '' begins a new document")
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        action="append",
        help="file with a text of any length, read as it is, or - for standard input; prints the continuation alone; "
        "may be given several times",
    )
    prompt.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='lines {"prompt": "..."}, or - for standard input; prints each line with its "continuation" added',
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="prompts are messages of a user, which the model's chat template writes out; lines of --prompts may hold "
        '{"messages": [{"role": "user", "content": "..."}]}',
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat, a system message before each prompt")
    parser.add_argument(
        "--max-new-tokens",
        type=Number(int, most=1_000_000_000),
        default=200,
        metavar="N",
        help="default %(default)s",
    )
    parser.add_argument(
        "--samples",
        type=Number(int, most=1_000_000),
        default=1,
        metavar="N",
        help='continuations of each prompt; lines of --prompts get "continuations" (default %(default)s)',
    )
    parser.add_argument(
        "--batch-size",
        type=Number(int, most=1_000_000),
        default=32,
        metavar="B",
        help="texts that are continued at once (default %(default)s)",
    )
    _add_sampling(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a continuation before this text; may be given several times",
    )
    parser.add_argument(
        "--end-token",
        action="append",
        default=[],
        metavar="TOKEN",
        help="a further token that ends a text, such as '<|im_end|>'; may be given several times",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from tokens with this share of the likeliest one's probability (default %(default)s)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1 makes tokens that the text has already less likely (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the continuation, token by token, of one prompt behind it; of several once each is whole."""
    if args.system is not None and not args.chat:
        raise UserError(f"--system {args.system!r} is a message; add --chat")
    rows = _prompts(args)
    from megakernel.checkpoint.trained_run import student
    from megakernel.generation import Sampling, generate_texts

    pieces = generate_texts(
        student(args.run_folder),
        [row["messages"] if args.chat else row["prompt"] for row in rows],
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty),
        seed=args.seed,
        samples=args.samples,
        stop=args.stop,
        end_tokens=args.end_token,
        batch_size=args.batch_size,
        step=args.step,
    )
    if len(rows) == args.samples == 1 and args.prompts is None:
        print("" if args.chat else args.prompt or "", end="", flush=True)
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
        return 0
    for row, texts in zip(rows, _whole(pieces, len(rows), args.samples)):
        if args.prompts is not None:
            added = {"continuations": texts} if args.samples > 1 else {"continuation": texts[0]}
            print(json.dumps({**row["line"], **added}), flush=True)
            continue
        for number, text in enumerate(texts, 1):
            title = row["title"] if len(rows) > 1 else ""
            sample = f"sample {number} of {args.samples}" if args.samples > 1 else ""
            print(f"=== {', '.join(filter(None, (title, sample)))}")
            print(("" if args.chat else args.prompt or "") + text, flush=True)
    return 0


def _whole(pieces: Iterator[Any], prompts: int, samples: int) -> Iterator[list[str]]:
    """The continuations of each prompt in turn, as soon as they and those before are whole."""
    texts = [[""] * samples for _ in range(prompts)]
    missing = [samples] * prompts
    shown = 0
    for piece in pieces:
        texts[piece.prompt][piece.sample] += piece.text
        missing[piece.prompt] -= piece.is_last
        while shown < prompts and not missing[shown]:
            yield texts[shown]
            shown += 1


def _prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each prompt: `prompt` or, with --chat, `messages`; its line of --prompts, and what it is called."""
    if args.prompts is not None:
        rows: list[dict[str, Any]] = [{"line": line, "title": ""} for line in _rows(args.prompts, args.chat)]
    elif args.prompt_file is not None:
        rows = [
            {"line": {"prompt": _read("--prompt-file", name)}, "title": name} for name in args.prompt_file
        ]
    else:
        rows = [{"line": {"prompt": args.prompt}, "title": ""}]
    for number, row in enumerate(rows, 1):
        line = row["line"]
        if not args.chat:
            row["prompt"] = line["prompt"]
            continue
        from data_pipeline.chat import check_messages

        said = line.get("messages") or [{"role": "user", "content": line.get("prompt")}]
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        name = (
            "messages" if args.prompts is None else f"--prompts {args.prompts}: messages of prompt {number}: "
        )
        row["messages"] = [*system, *check_messages(said, name)]
    return rows


def _read(option: str, name: str) -> str:
    """The text of a file, its line ends too, or of standard input."""
    try:
        return (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode()
    except (OSError, ValueError) as error:
        reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        raise UserError(f"{option} {name} {reason} ({error}); give a file of UTF-8 text, or -") from None


def _rows(name: str, chat: bool) -> list[dict[str, Any]]:
    """The objects in the lines of a file; empty ones are passed over."""
    rows = []
    for number, line in enumerate(_read("--prompts", name).split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = line
        has_prompt = isinstance(row, dict) and (
            isinstance(row.get("prompt"), str) or (chat and "messages" in row)
        )
        if row is not None and not has_prompt:
            raise UserError(f'--prompts {name}: line {number} has no prompt; write {{"prompt": "..."}}')
        rows += [] if row is None else [row]
    if not rows:
        raise UserError(f'--prompts {name} holds no line; write {{"prompt": "..."}} for each prompt')
    return rows
