"""Servers of this machine that receive a run's messages: one of HTTP and one of mail."""

import contextlib
import json
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Webhook:
    """A server that keeps the JSON that is posted to it."""

    url: str = ""
    received: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    """What it answers."""

    silent: bool = False
    """Whether it answers only when it closes."""

    closing: threading.Event = field(default_factory=threading.Event)

    def events(self) -> list[str]:
        """The events that were told, in order."""
        return [one["event"] for one in self.received]


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    kept = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            kept.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if kept.silent:
                kept.closing.wait()
            self.send_response(kept.status)
            if kept.status == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            kept.received.append({"event": "a GET"})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        kept.url = f"http://127.0.0.1:{server.server_port}/hook/t0psecret"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield kept
        kept.closing.set()
        server.shutdown()


@contextlib.contextmanager
def mail_server(refuses: str = "") -> Iterator[tuple[str, list[str]]]:
    """Its address, and each mail it gets; refuses: a recipient that it does not know."""
    mails: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline().decode().strip():
                word = line.partition(" ")[0].upper()
                if word == "DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = iter(lambda: self.rfile.readline().decode().rstrip("\r\n"), ".")
                    mails.append("\n".join(lines))
                unknown = word == "RCPT" and refuses and refuses in line
                answers = {"QUIT": b"221 bye\r\n"}
                self.wfile.write(b"550 no such user\r\n" if unknown else answers.get(word, b"250 ok\r\n"))
                if word == "QUIT":
                    return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", mails
        server.shutdown()
