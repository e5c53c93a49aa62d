"""`megakernel serve`: a trained model over HTTP."""

import argparse
import ipaddress
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from launch.arguments import Number, add_model_arguments
from megakernel.config import UserError

HELP = "answer OpenAI's clients and browsers with a trained model, over HTTP"
EXAMPLE = "megakernel serve runs/demo --port 8000"

KEY = "MEGAKERNEL_API_KEY"
"""Environment variable with the key that requests have to bring."""

_COUNT = Number(int, least=1, most=1_000_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_model_arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address (default %(default)s: for this machine alone)"
    )
    parser.add_argument(
        "--port",
        type=Number(int, least=0, most=65535),
        default=8000,
        metavar="P",
        help="0 takes a free one and prints it (default %(default)s)",
    )
    parser.add_argument("--name", help="the model's name for clients (default: that of its folder)")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the key that requests have to bring (default: ${KEY}, and where that is not set, none)",
    )
    parser.add_argument(
        "--batch-size",
        type=_COUNT,
        default=32,
        metavar="B",
        help="texts that are continued at once; others wait (default %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=_COUNT,
        default=4096,
        metavar="N",
        help="most new tokens of a text, and of a chat that does not say how many (default %(default)s)",
    )
    parser.add_argument(
        "--sessions",
        type=_COUNT,
        default=1000,
        metavar="N",
        help="states kept in memory, those that were used last (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise UserError(f"serve needs {' and '.join(missing)}; pip install -e '.[serve]' -c constraints.txt")
    key = _key(args.api_key_file)
    from megakernel.checkpoint.opened import find
    from megakernel.checkpoint.trained_run import student

    opened = find(student(args.run_folder), args.step)
    opened.check_continues_text()
    with _listening(args.host, args.port) as listening:
        from megakernel.generation.serving.server import serve
        from megakernel.generation.serving.worker import Worker

        worker = Worker(
            opened, batch_size=args.batch_size, most_sessions=args.sessions, most_tokens=args.max_tokens
        )
        name = args.name or opened.folder.resolve().name
        host, port = listening.getsockname()[:2]
        if key is None and not ipaddress.ip_address(host).is_loopback:
            print(f"megakernel: note: no API key: whoever reaches {host} can use the model", file=sys.stderr)
        shown = f"[{host}]" if ":" in host else host
        print(f"{name} at http://{shown}:{port} (Ctrl-C ends it)", flush=True)
        try:
            serve(worker, listening, name, key)
        except KeyboardInterrupt:
            print("ended", flush=True)
    return 0


def _key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(KEY) or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(
            f"--api-key-file {file} cannot be read ({error}); give a file with one line"
        ) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"--api-key-file {file} holds no key; write one line of ASCII without spaces")
    return key


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host} --port {port} cannot be listened at ({error}); give others") from None
