"""What the server accepts of a connection: whom a request may address, and how large and slow it may be."""

import asyncio
import ipaddress
from asyncio import TimeoutError as AsyncTimeoutError  # another class than TimeoutError before Python 3.11
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .protocol import Refusal


@dataclass(frozen=True)
class Limits:
    """Limits of requests."""

    request_bytes: int = 16 * 2**20
    """Maximum length of a request with a prompt or messages: a million tokens of text are about 5 MB."""

    state_bytes: int = 2**30
    """Maximum length of an uploaded session: states of softmax layers are large."""

    read_seconds: float = 60.0
    """Maximum time until a request has arrived."""


DEFAULT_LIMITS = Limits()


class Hosts:
    """The names by which requests may address the server.

    A browser lets a page talk to another site's address once that site's name resolves to it (DNS rebinding), but then
    sends that name. So a server that only this machine reaches answers to its own names alone.
    """

    def __init__(self, names: Iterable[str] = ()):
        """names: accepted besides `localhost` and loopback addresses."""
        self._names = {"localhost", *(name.lower().strip("[]") for name in names)}

    def check(self, request: Request) -> None:
        """Raise Refusal if the request is for another host."""
        given = request.headers.get("host", "")
        name = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
        if name.lower() not in self._names and not is_loopback(name):
            raise Refusal(
                f"Host {given[:100]!r} is not a name of this server; write localhost, or start it with "
                "--allow-host NAME",
                status=403,
                code="host_not_allowed",
            )


OWN_NAMES = Hosts()
"""This machine's names for itself."""


def is_loopback(host: str) -> bool:
    """Whether a host is an address of this machine's loopback interface, and not a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def read_body(request: Request, limit: int, option: str, seconds: float) -> bytes:
    """The body of a request. option: what sets the limit, for errors.

    Raises Refusal for one of more than `limit` bytes, and for one that has not arrived after `seconds`.
    """

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit, option)
            parts.append(part)
        return b"".join(parts)

    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise _too_large(limit, option)
    try:
        return await asyncio.wait_for(read(), seconds)
    except AsyncTimeoutError:
        message = (
            f"the body did not arrive within {seconds:g} s (--read-timeout); send it faster, or send less"
        )
        raise Refusal(message, status=408, code="request_timeout") from None


def _too_large(limit: int, option: str) -> Refusal:
    return Refusal(
        f"the body is larger than this server's limit of {limit:,} bytes ({option}); send less",
        status=413,
        code="request_too_large",
    )


def protocol(seconds: float) -> Any:
    """uvicorn's HTTP protocol, which also closes connections that have sent no whole header for `seconds`.

    uvicorn itself waits without limit between a connection's first byte and the end of a request's header.
    """
    base: Any = AutoHTTPProtocol

    class Protocol(base):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_request()

        def _expect_request(self) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if self.timeout_keep_alive_task is None and not answering:
                timer = self.loop.call_later(seconds, self.timeout_keep_alive_handler)
                self.timeout_keep_alive_task: Any = timer

    return Protocol
