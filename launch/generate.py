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
    add = parser.add_argument
    add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="text to continue; '' begins a new document; may be given several times",
    )
    prompt.add_argument(
        "--prompt-file",
        metavar="FILE",
        action="append",
        help="file with a text of any length, or - for standard input; prints only the continuation; may be given "
        "several times",
    )
    prompt.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='lines {"prompt": "..."}, or - for standard input; prints each line with its "continuation" added',
    )
    add(
        "--chat",
        action="store_true",
        help="treat prompts as user messages and apply the model's chat template; lines of --prompts may be "
        '{"messages": [{"role": "user", "content": "..."}]}',
    )
    add("--system", metavar="TEXT", help="with --chat, a system message before each prompt")
    add(
        "--max-new-tokens",
        type=Number(int, maximum=1_000_000_000),
        default=200,
        metavar="N",
        help="default %(default)s",
    )
    add(
        "--samples",
        type=Number(int, maximum=1_000_000),
        default=1,
        metavar="N",
        help='continuations of each prompt; lines of --prompts get "continuations" (default %(default)s)',
    )
    add(
        "--batch-size",
        type=Number(int, maximum=1_000_000),
        default=32,
        metavar="B",
        help="texts that are continued at the same time (default %(default)s)",
    )
    _add_sampling(parser)
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a continuation before this text; may be given several times",
    )
    add(
        "--end-token",
        action="append",
        default=[],
        metavar="TOKEN",
        help="another token that ends a text, such as '<|im_end|>'; may be given several times",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the most likely token (default %(default)s)",
    )
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: from all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the most likely tokens with this total probability (default %(default)s)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="draw from tokens with at least this share of the largest probability (default %(default)s)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1 makes tokens that are already in the text less likely (default %(default)s)",
    )
    add("--seed", type=int, default=0, help="seed of sampling (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the continuation of a single prompt token by token, of several when each is complete."""
    if args.system is not None and not args.chat:
        raise UserError(f"--system {args.system!r} is a message; add --chat")
    prompts = _read_prompts(args)
    from megakernel.checkpoint.trained_run import student_run
    from megakernel.generation import Sampling, generate_texts

    pieces = generate_texts(
        student_run(args.run_folder),
        [prompt["messages"] if args.chat else prompt["prompt"] for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty),
        seed=args.seed,
        samples=args.samples,
        stop=args.stop,
        end_tokens=args.end_token,
        batch_size=args.batch_size,
        step=args.step,
    )
    if len(prompts) == args.samples == 1 and args.prompts is None:
        print(prompts[0]["shown"], end="", flush=True)
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
        return 0
    for prompt, texts in zip(prompts, _completed(pieces, len(prompts), args.samples)):
        if args.prompts is not None:
            added = {"continuations": texts} if args.samples > 1 else {"continuation": texts[0]}
            print(json.dumps({**prompt["line"], **added}), flush=True)
            continue
        for number, text in enumerate(texts, 1):
            title = prompt["title"] if len(prompts) > 1 else ""
            sample = f"sample {number} of {args.samples}" if args.samples > 1 else ""
            print(f"=== {', '.join(filter(None, (title, sample)))}")
            print(prompt["shown"] + text, flush=True)
    return 0


def _completed(pieces: Iterator[Any], prompts: int, samples: int) -> Iterator[list[str]]:
    """Yield each prompt's continuations in order, as soon as these and all earlier ones are complete."""
    texts = [[""] * samples for _ in range(prompts)]
    unfinished = [samples] * prompts
    next_prompt = 0
    for piece in pieces:
        texts[piece.prompt][piece.sample] += piece.text
        unfinished[piece.prompt] -= piece.is_last
        while next_prompt < prompts and not unfinished[next_prompt]:
            yield texts[next_prompt]
            next_prompt += 1


def _read_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One dict per prompt: `prompt` or, with --chat, `messages`; `line`, its object in --prompts; `title`; `shown`,
    what is printed before its continuation."""
    if args.prompts is not None:
        lines = _read_jsonl(args.prompts, args.chat)
        prompts: list[dict[str, Any]] = [{"line": line, "title": "", "shown": ""} for line in lines]
    elif args.prompt_file is not None:
        texts = [_read_text("--prompt-file", name) for name in args.prompt_file]
        prompts = [
            {"line": {"prompt": text}, "title": name, "shown": ""}
            for text, name in zip(texts, args.prompt_file)
        ]
    else:
        prompts = [
            {"line": {"prompt": text}, "title": f"prompt {number}", "shown": "" if args.chat else text}
            for number, text in enumerate(args.prompt, 1)
        ]
    for number, prompt in enumerate(prompts, 1):
        line = prompt["line"]
        if not args.chat:
            prompt["prompt"] = line["prompt"]
            continue
        from data_pipeline.chat import check_messages

        messages = line.get("messages") or [{"role": "user", "content": line.get("prompt")}]
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        source = (
            "messages" if args.prompts is None else f"--prompts {args.prompts}: prompt {number}: messages"
        )
        prompt["messages"] = [*system, *check_messages(messages, source)]
    return prompts


def _read_text(option: str, name: str) -> str:
    """The text of a file or of standard input, line ends unchanged."""
    try:
        return (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode()
    except (OSError, ValueError) as error:
        reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        raise UserError(f"{option} {name} {reason} ({error}); give a file of UTF-8 text, or -") from None


def _read_jsonl(name: str, chat: bool) -> list[dict[str, Any]]:
    """The JSON objects in the lines of a file; empty lines are skipped."""
    records = []
    for number, line in enumerate(_read_text("--prompts", name).removeprefix("\ufeff").split("\n"), 1):
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            record = line
        has_prompt = isinstance(record, dict) and (
            isinstance(record.get("prompt"), str) or (chat and "messages" in record)
        )
        if record is not None and not has_prompt:
            raise UserError(f'--prompts {name}: line {number} has no prompt; write {{"prompt": "..."}}')
        records += [] if record is None else [record]
    if not records:
        raise UserError(f'--prompts {name} holds no line; write {{"prompt": "..."}} for each prompt')
    return records
