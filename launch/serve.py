"""`megakernel serve`: a trained model over HTTP."""

import argparse
import os
import socket
import sys
from pathlib import Path

from launch.arguments import Number, add_model_arguments
from launch.messages import printable
from megakernel.config import UserError

HELP = "serve a trained model over HTTP to OpenAI's clients and browsers"
EXAMPLE = "megakernel serve runs/demo --port 8000"
NEEDS = ("fastapi", "uvicorn")

KEY = "MEGAKERNEL_API_KEY"
"""Environment variable with the key that requests must send."""

_COUNT = Number(int, minimum=1, maximum=1_000_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s: local only)")
    add(
        "--port",
        type=Number(int, minimum=0, maximum=65535),
        default=8000,
        metavar="P",
        help="0 takes a free one and prints it (default %(default)s)",
    )
    add("--name", help="the model's name for clients (default: that of its folder)")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the key that requests must send (default: ${KEY}; if that is not set, no key)",
    )
    add(
        "--batch-size",
        type=_COUNT,
        default=32,
        metavar="B",
        help="texts that are continued at the same time; others wait (default %(default)s)",
    )
    add(
        "--max-tokens",
        type=_COUNT,
        default=4096,
        metavar="N",
        help="most new tokens of a text, and those of a chat request that sets no limit (default %(default)s)",
    )
    add(
        "--sessions",
        type=_COUNT,
        default=1000,
        metavar="N",
        help="most session states kept in host memory; the least recently used are dropped (default %(default)s)",
    )
    add(
        "--max-request-mib",
        type=_COUNT,
        default=16,
        metavar="N",
        help="longest request with a prompt or messages, in MiB (default %(default)s)",
    )
    add(
        "--max-state-mib",
        type=_COUNT,
        default=1024,
        metavar="N",
        help="longest state of a session that is uploaded, in MiB (default %(default)s)",
    )
    add(
        "--read-timeout",
        type=Number(float, minimum=0.1, maximum=86400),
        default=60.0,
        metavar="S",
        help="seconds within which a request must arrive (default %(default)g)",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which requests may address the server besides localhost, such as a proxy's; repeatable "
        "(default: none if only this machine reaches it, else any)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    key = _key(args.api_key_file)
    from megakernel.checkpoint.opened import find_model
    from megakernel.checkpoint.trained_run import student_run

    opened = find_model(student_run(args.run_folder), args.step)
    opened.check_continues_text()
    with _listening(args.host, args.port) as listening:
        from megakernel.generation.serving.gate import Hosts, Limits, is_loopback
        from megakernel.generation.serving.server import http_server, serve
        from megakernel.generation.serving.worker import Worker

        worker = Worker(
            opened, batch_size=args.batch_size, max_sessions=args.sessions, max_new_tokens=args.max_tokens
        )
        name = args.name or opened.folder.resolve().name
        host, port = listening.getsockname()[:2]
        hosts = Hosts((args.host, *args.allow_host)) if is_loopback(host) or args.allow_host else None
        limits = Limits(args.max_request_mib * 2**20, args.max_state_mib * 2**20, args.read_timeout)
        server = http_server(worker, name, key, hosts=hosts, limits=limits)
        if key is None and not is_loopback(host):
            print(f"megakernel: note: no API key: whoever reaches {host} can use the model", file=sys.stderr)
        url_host = f"[{host}]" if ":" in host else host
        print(f"{printable(name)} at http://{url_host}:{port} (Ctrl-C ends it)", flush=True)
        try:
            serve(server, worker, listening)
        except KeyboardInterrupt:
            print("ended", flush=True)
    return 0


def _key(file: Path | None) -> str | None:
    if file is None:
        source, key = f"${KEY}", os.environ.get(KEY, "")
        if not key:
            return None
    else:
        source = f"--api-key-file {file}"
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{source} cannot be read ({error}); give a file with one line") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{source} holds no key; write one line of ASCII without spaces")
    return key


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host} --port {port} cannot be listened on ({error}); give others") from None
