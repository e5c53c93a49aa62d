"""`megakernel generate`: text from a trained model."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.arguments import Number, add_model_arguments
from launch.messages import printable
from megakernel.config import UserError
from megakernel.config.decoding import NEW_TOKENS, Beams

HELP = "continue prompts, answer messages, or translate, with a trained model"
EXAMPLE = "megakernel generate runs/demo --prompt 'def main' --max-new-tokens 200"


_SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": None,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
    "samples": 1,
    "stop": [],
    "end_token": [],
    "chat": False,
    "system": None,
}
"""Options of texts that are continued, with their defaults; None stands for what is not given."""

_BEAMS = {"beams": Beams.count, "length_penalty": Beams.length_penalty}
"""Those of translations."""

_NAMED = 5
"""Prompts that a note names."""


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
        default=None,
        help="treat prompts as user messages and apply the model's chat template; lines of --prompts may be "
        '{"messages": [{"role": "user", "content": "..."}]}',
    )
    add("--system", metavar="TEXT", help="with --chat, a system message before each prompt")
    add(
        "--max-new-tokens",
        type=Number(int, maximum=1_000_000_000),
        metavar="N",
        help=f"default {NEW_TOKENS}, of a translation at most the positions that the model has parameters for",
    )
    add(
        "--samples",
        type=Number(int, maximum=1_000_000),
        metavar="N",
        help=f'continuations of each prompt; lines of --prompts get "continuations" (default {_SAMPLING["samples"]})',
    )
    add(
        "--batch-size",
        type=Number(int, maximum=1_000_000),
        default=32,
        metavar="B",
        help="texts that are continued at the same time, of an encoder-decoder its hypotheses: B / beams texts "
        "(default %(default)s)",
    )
    add(
        "--beams",
        type=Number(int, maximum=10_000),
        metavar="N",
        help="of an encoder-decoder: hypotheses that go on at the same time; 1 takes the most likely token each "
        f"time (default {_BEAMS['beams']})",
    )
    add(
        "--length-penalty",
        type=Number(float, 0, 100),
        metavar="P",
        help="of an encoder-decoder: power of its length by which a text's log-probability is divided (default "
        f"{_BEAMS['length_penalty']})",
    )
    _add_sampling(parser)
    add(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end a continuation before this text; may be given several times",
    )
    add(
        "--end-token",
        action="append",
        metavar="TOKEN",
        help="another token that ends a text, such as '<|im_end|>'; may be given several times",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0 takes the most likely token (default {_SAMPLING['temperature']})",
    )
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: from all)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help=f"draw from the most likely tokens with this total probability (default {_SAMPLING['top_p']})",
    )
    add(
        "--min-p",
        type=float,
        metavar="P",
        help=f"draw from tokens with at least this share of the largest probability (default {_SAMPLING['min_p']})",
    )
    add(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="above 1 makes tokens that are already in the text less likely (default "
        f"{_SAMPLING['repetition_penalty']})",
    )
    add("--seed", type=int, help=f"seed of sampling (default {_SAMPLING['seed']})")


def run(args: argparse.Namespace) -> int:
    """Print the continuation of a single prompt token by token, of several when each is complete."""
    if args.system is not None and not args.chat:
        raise UserError(f"--system {args.system!r} is a message; add --chat")
    prompts = _read_prompts(args)
    from megakernel.checkpoint.trained_run import recorded_config, student_run
    from megakernel.generation import Sampling, generate_texts

    folder = student_run(args.run_folder)
    is_run = (folder / "config.yaml").is_file()  # what is none is refused below, or a model of `transformers`
    config = recorded_config(folder) if is_run else None
    translates = config is not None and config.model.encoder is not None
    for name in _SAMPLING if translates else _BEAMS:
        if (value := getattr(args, name)) is not None:
            option = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            reason = "translates by beam search" if translates else "continues texts by drawing tokens"
            raise UserError(f"{option} has no effect: {folder} {reason}; leave it out")
    for name, default in {**_SAMPLING, **_BEAMS}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if config is not None and translates:
        _translate(args, folder, prompts, config.training.seq_len)
        return 0
    pieces = generate_texts(
        folder,
        [prompt["messages"] if args.chat else prompt["prompt"] for prompt in prompts],
        max_new_tokens=NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens,
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
    _print_all(args, pieces, prompts)
    return 0


def _translate(args: argparse.Namespace, folder: Path, prompts: list[dict[str, Any]], seq_len: int) -> None:
    """Print translations, and on stderr which of them one should not rely on. seq_len: of sources in training."""
    from megakernel.generation import translate_texts

    texts = [prompt["prompt"] for prompt in prompts]
    if args.prompt_file is not None:
        # Editors end a file with a newline, which no source of the training data has.
        texts = [re.sub(r"\r?\n\Z", "", text) for text in texts]
    found = translate_texts(
        folder,
        texts,
        max_new_tokens=args.max_new_tokens,
        beams=Beams(args.beams, args.length_penalty),
        batch_size=args.batch_size,
        step=args.step,
    )
    prompts = [{**prompt, "shown": ""} for prompt in prompts]

    def pieces() -> Iterator[Any]:
        for text in found:
            is_long = text.source_tokens > seq_len
            prompts[text.prompt]["added"] = {"is_complete": text.is_complete, "is_long": is_long}
            yield text

    _print_all(args, pieces(), prompts)
    _note("without an end within --max-new-tokens", prompts, "is_complete", False)
    _note(f"longer than sources in training (training.seq_len={seq_len})", prompts, "is_long", True)


def _note(what: str, prompts: list[dict[str, Any]], key: str, value: bool) -> None:
    """Name on stderr the prompts whose translations have this value, if there are any."""
    names = [
        prompt["title"] or f"prompt {number}"
        for number, prompt in enumerate(prompts, 1)
        if prompt["added"][key] is value
    ]
    if names:
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        print(printable(f"{what}: {', '.join(names[:_NAMED])}{more}"), file=sys.stderr)


def _print_all(args: argparse.Namespace, pieces: Iterator[Any], prompts: list[dict[str, Any]]) -> None:
    """Print the continuations of each prompt when they are complete."""
    for prompt, texts in zip(prompts, _completed(pieces, len(prompts), args.samples)):
        if args.prompts is not None:
            added = {"continuations": texts} if args.samples > 1 else {"continuation": texts[0]}
            print(json.dumps({**prompt["line"], **added, **prompt.get("added", {})}), flush=True)
            continue
        for number, text in enumerate(texts, 1):
            title = prompt["title"] if len(prompts) > 1 else ""
            sample = f"sample {number} of {args.samples}" if args.samples > 1 else ""
            if title or sample:
                print(f"=== {', '.join(filter(None, (title, sample)))}")
            print(prompt["shown"] + text, flush=True)


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
    what is printed before its continuation. Translations add `added`, further keys of its object."""
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
