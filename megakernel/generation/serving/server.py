"""The HTTP server: OpenAI's endpoints, sessions, and a page to try them."""

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from megakernel.config import RunFailed, UserError

from .gate import DEFAULT_LIMITS, OWN_NAMES, Hosts, Limits, protocol, read_body
from .protocol import (
    MAX_SESSION_NAME,
    SESSION_NAME,
    Body,
    ChatBody,
    CompletionBody,
    Refusal,
    error_body,
    invalid,
    parse,
)
from .replies import Reply
from .sessions import Session, to_file
from .worker import GenerationJob, Piece, Worker

_INVALID = "invalid_request_error"
_SESSION = "/v1/sessions/{session}"
_Name = Annotated[str, PathParameter(pattern=SESSION_NAME, max_length=MAX_SESSION_NAME)]
_READ = ["GET", "HEAD"]


def create_app(
    worker: Worker,
    name: str,
    api_key: str | None = None,
    *,
    hosts: Hosts | None = OWN_NAMES,
    limits: Limits = DEFAULT_LIMITS,
) -> FastAPI:
    """The application.

    Args:
        worker: the model's thread.
        name: the model's name.
        api_key: the key that requests under /v1 must send; None: no key.
        hosts: the names by which requests may address the server; None: any.
        limits: limits of requests.
    """

    def check_key(request: Request) -> None:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(key.encode(), api_key.encode()):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            raise Refusal(message, status=401, code="invalid_api_key")

    everywhere = [] if hosts is None else [Depends(hosts.check)]
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=everywhere)
    _answer_errors(app)
    keyed = [Depends(check_key)]
    model = {"id": name, "object": "model", "created": 0, "owned_by": "megakernel"}

    def check_model(model_name: str | None) -> None:
        if model_name not in (None, name):
            raise Refusal(
                f"model {model_name!r} is not served here; write {name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def answer(kind: type[Body], request: Request) -> Response:
        _check_is_json(request)
        data = await read_body(request, limits.request_bytes, "--max-request-mib", limits.read_seconds)
        reader = worker.reader(len(data))
        body = await reader.run(lambda: parse(kind, data))
        check_model(body.model)
        job = await worker.submit(body, reader)
        reply = Reply(body, name, worker.fingerprint, worker.token_bytes)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return _EventStream(worker, job, reply, usage)
        try:
            pieces = await _all_pieces(request, job)
        finally:
            worker.remove(job)
        if pieces is None:
            return Response(status_code=499)
        return JSONResponse(reply.complete(pieces, len(job.texts), job.usage))

    @app.post("/v1/completions", dependencies=keyed)
    async def completions(request: Request) -> Response:
        return await answer(CompletionBody, request)

    @app.post("/v1/chat/completions", dependencies=keyed)
    async def chat_completions(request: Request) -> Response:
        return await answer(ChatBody, request)

    @app.api_route("/v1/models", dependencies=keyed, methods=_READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.api_route("/v1/models/{model_name:path}", dependencies=keyed, methods=_READ)
    async def one_model(model_name: str) -> dict[str, Any]:
        check_model(model_name)
        return model

    def session_info(session_name: str, session: Session) -> dict[str, Any]:
        return {
            "id": session_name,
            "object": "session",
            "chat": session.messages is not None,
            "tokens": session.state.tokens,
            "bytes": session.size,
            "softmax_bytes": session.tokens_read * worker.softmax_bytes_per_token,
            "softmax_bytes_per_token": worker.softmax_bytes_per_token,
            "tokens_per_second": session.tokens_per_second,
            "last_used": int(session.used),
        }

    @app.api_route("/v1/sessions", dependencies=keyed, methods=_READ)
    async def sessions() -> dict[str, Any]:
        sessions = await worker.call(worker.sessions.items)
        return {"object": "list", "data": [session_info(key, session) for key, session in sessions]}

    @app.api_route(_SESSION, dependencies=keyed, methods=_READ)
    async def one_session(session: _Name) -> dict[str, Any]:
        return session_info(session, await worker.call(lambda: worker.sessions.find(session)))

    @app.api_route(f"{_SESSION}/state", dependencies=keyed, methods=_READ)
    async def state(session: _Name) -> Response:
        headers = {"Content-Disposition": f'attachment; filename="{session}.safetensors"'}
        found = await worker.call(lambda: worker.sessions.find(session))
        data = await asyncio.to_thread(to_file, found, worker.fingerprint)
        return Response(data, media_type="application/octet-stream", headers=headers)

    @app.put(f"{_SESSION}/state", dependencies=keyed)
    async def restore(session: _Name, request: Request) -> dict[str, Any]:
        data = await read_body(request, limits.state_bytes, "--max-state-mib", limits.read_seconds)
        return session_info(session, await worker.restore(session, data))

    @app.delete(_SESSION, dependencies=keyed)
    async def forget(session: _Name) -> dict[str, Any]:
        await worker.call(lambda: worker.sessions.delete(session))
        return {"id": session, "object": "session", "deleted": True}

    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        health = worker.health
        can_chat = worker.tokenizer.chat_template is not None
        return JSONResponse(
            {**health, "model": name, "chat": can_chat}, 200 if health["status"] == "ok" else 503
        )

    @app.api_route("/", methods=_READ)
    async def page() -> Response:
        return HTMLResponse(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

    return app


def _check_is_json(request: Request) -> None:
    """Raise Refusal for a body of another type: a page of any site can make a browser send such, but not JSON."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        has = f"Content-Type {given[:100]!r}" if given else "no Content-Type"
        raise Refusal(
            f"the body has {has}; send JSON with the header Content-Type: application/json "
            "(curl: -H 'Content-Type: application/json')",
            status=415,
        )


class _EventStream(StreamingResponse):
    """Server-sent events of a job; removes the job's texts when the client disconnects."""

    def __init__(self, worker: Worker, job: GenerationJob, reply: Reply, usage: bool):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(job, reply, usage), media_type="text/event-stream", headers=headers)
        self._worker, self._job = worker, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._worker.remove(self._job)


async def _events(job: GenerationJob, reply: Reply, usage: bool) -> AsyncIterator[str]:
    more = {"usage": None} if usage else {}
    try:
        for part in reply.first_chunks(len(job.texts)):
            yield _event({**part, **more})
        async for piece in job.read():
            for part in reply.chunks(piece):
                yield _event({**part, **more})
    except RunFailed as error:
        yield _event(error_body(str(error), "server_error"))
        return
    if usage:
        yield _event(reply.usage(job.usage))
    yield "data: [DONE]\n\n"


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part, ensure_ascii=False)}\n\n"


async def _all_pieces(request: Request, job: GenerationJob) -> list[Piece] | None:
    """All pieces of a job; None as soon as its client disconnects."""

    async def read() -> list[Piece]:
        return [piece async for piece in job.read()]

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reading, disconnect = asyncio.ensure_future(read()), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({reading, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        reading.cancel()
        disconnect.cancel()


def _answer_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's format."""

    @app.exception_handler(UserError)
    async def refused(request: Request, error: UserError) -> JSONResponse:
        key = str(error).partition("=")[0]
        param = key if key in {**CompletionBody.model_fields, **ChatBody.model_fields} else None
        if isinstance(error, Refusal):
            body = error_body(str(error), _INVALID, error.param or param, error.code)
            # The rest of a body that comes too late would be read as the next request.
            headers = {"Connection": "close"} if error.status == 408 else None
            return JSONResponse(body, error.status, headers)
        return JSONResponse(error_body(str(error), _INVALID, param), 400)

    @app.exception_handler(RequestValidationError)
    async def wrong_path(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return await refused(request, invalid({**first, "loc": first["loc"][1:]}))

    @app.exception_handler(ClientDisconnect)
    async def disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(RunFailed)
    async def failed(request: Request, error: RunFailed) -> JSONResponse:
        return JSONResponse(error_body(str(error), "server_error"), 503)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(message, _INVALID), error.status_code)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(f"{type(error).__name__}: {error}", "server_error"), 500)


class _Server(uvicorn.Server):
    """Ends texts in progress when a signal arrives, so that shutdown does not wait for them."""

    worker: Worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.worker.close()
        super().handle_exit(sig, frame)


def http_server(
    worker: Worker,
    name: str,
    api_key: str | None = None,
    *,
    hosts: Hosts | None = OWN_NAMES,
    limits: Limits = DEFAULT_LIMITS,
) -> uvicorn.Server:
    """A server of `create_app`, with its arguments."""
    app = create_app(worker, name, api_key, hosts=hosts, limits=limits)
    server = _Server(
        uvicorn.Config(
            app,
            http=protocol(limits.read_seconds),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    server.worker = worker
    return server


def serve(server: uvicorn.Server, worker: Worker, listening: socket.socket) -> None:
    """Answer requests until a signal arrives; it is raised again once all are answered."""
    try:
        server.run(sockets=[listening])
    finally:
        worker.close()
