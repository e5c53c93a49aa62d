"""HTTP around the model's thread: OpenAI's endpoints, sessions and a page to try them."""

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
from starlette.types import Receive, Scope, Send

from megakernel.config import RunFailed, UserError

from .protocol import SESSION_NAME, Body, ChatBody, CompletionBody, Refusal, error_body
from .replies import Reply
from .sessions import Session, to_file
from .worker import Job, Piece, Worker

MOST_BYTES = 2**30
"""Of a request: states of softmax layers are long."""

_INVALID = "invalid_request_error"
_SESSION = "/v1/sessions/{session}"
_Name = Annotated[str, PathParameter(pattern=SESSION_NAME)]


def create_app(worker: Worker, name: str, api_key: str | None = None) -> FastAPI:
    """The application. name: the model's; api_key: what requests under /v1 have to bring."""

    def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            said = "the API key is missing or wrong; send Authorization: Bearer KEY"
            raise Refusal(said, status=401, code="invalid_api_key")

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, max_body_size=MOST_BYTES)
    _answer_errors(app)
    keyed = [Depends(check_key)]
    model = {"id": name, "object": "model", "created": 0, "owned_by": "megakernel"}

    def check_model(asked: str | None) -> None:
        if asked not in (None, name):
            raise Refusal(
                f"model {asked!r} is not served here; write {name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def answer(body: Body, request: Request) -> Response:
        check_model(body.model)
        job = await worker.submit(body)
        reply = Reply(body, name, worker.fingerprint, worker.tokenizer)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return _Stream(worker, job, reply, usage)
        try:
            pieces = await _unless_gone(request, job)
        finally:
            worker.remove(job)
        if pieces is None:
            return Response(status_code=499)
        return JSONResponse(reply.whole(pieces, len(job.texts), job.usage))

    @app.post("/v1/completions", dependencies=keyed)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await answer(body, request)

    @app.post("/v1/chat/completions", dependencies=keyed)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await answer(body, request)

    @app.get("/v1/models", dependencies=keyed)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{asked:path}", dependencies=keyed)
    async def one_model(asked: str) -> dict[str, Any]:
        check_model(asked)
        return model

    @app.get("/v1/sessions", dependencies=keyed)
    async def sessions() -> dict[str, Any]:
        found = await worker.call(worker.sessions.items)
        return {"object": "list", "data": [_told(key, session) for key, session in found]}

    @app.get(f"{_SESSION}/state", dependencies=keyed)
    async def state(session: _Name) -> Response:
        headers = {"Content-Disposition": f'attachment; filename="{session}.safetensors"'}
        data = await worker.call(lambda: to_file(worker.sessions.find(session), worker.fingerprint))
        return Response(data, media_type="application/octet-stream", headers=headers)

    @app.put(f"{_SESSION}/state", dependencies=keyed)
    async def restore(session: _Name, request: Request) -> dict[str, Any]:
        data = await request.body()
        return _told(session, await worker.call(lambda: worker.restore(session, data)))

    @app.delete(_SESSION, dependencies=keyed)
    async def forget(session: _Name) -> dict[str, Any]:
        await worker.call(lambda: worker.sessions.forget(session))
        return {"id": session, "object": "session", "deleted": True}

    @app.get("/health")
    async def health() -> Response:
        found = worker.health
        can_chat = worker.tokenizer.chat_template is not None
        return JSONResponse(
            {**found, "model": name, "chat": can_chat}, 200 if found["status"] == "ok" else 503
        )

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))

    return app


def _told(name: str, session: Session) -> dict[str, Any]:
    tokens, used = session.behind.tokens, int(session.used)
    return {"id": name, "object": "session", "tokens": tokens, "bytes": session.size, "last_used": used}


class _Stream(StreamingResponse):
    """Server-sent events; whoever goes away in the middle of them takes his texts with him."""

    def __init__(self, worker: Worker, job: Job, reply: Reply, usage: bool):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(job, reply, usage), media_type="text/event-stream", headers=headers)
        self._worker, self._job = worker, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._worker.remove(self._job)


async def _events(job: Job, reply: Reply, usage: bool) -> AsyncIterator[str]:
    more = {"usage": None} if usage else {}
    try:
        for part in reply.opening(len(job.texts)):
            yield _event({**part, **more})
        async for piece in job.read():
            for part in reply.piece(piece):
                yield _event({**part, **more})
    except RunFailed as error:
        yield _event(error_body(str(error), "server_error"))
        return
    if usage:
        yield _event(reply.usage(job.usage))
    yield "data: [DONE]\n\n"


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part, ensure_ascii=False)}\n\n"


async def _unless_gone(request: Request, job: Job) -> list[Piece] | None:
    """All pieces of a job; None as soon as its client has gone."""

    async def read() -> list[Piece]:
        return [piece async for piece in job.read()]

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reading, going = asyncio.ensure_future(read()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({reading, going}, return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else None
    finally:
        reading.cancel()
        going.cancel()


def _answer_errors(app: FastAPI) -> None:
    """Every error is one of OpenAI's shape."""

    @app.exception_handler(UserError)
    async def refused(request: Request, error: UserError) -> JSONResponse:
        key = str(error).partition("=")[0]
        param = key if key in {**CompletionBody.model_fields, **ChatBody.model_fields} else None
        if isinstance(error, Refusal):
            body = error_body(str(error), _INVALID, error.param or param, error.code)
            return JSONResponse(body, error.status)
        return JSONResponse(error_body(str(error), _INVALID, param), 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            return await refused(request, cause)
        # Without the types of a field that has one of several.
        place = [
            part for part in map(str, first["loc"][1:]) if part != "str" and not part.startswith("list[")
        ]
        if first["type"] == "json_invalid":
            place = []
        said = f"{'.'.join(place) or 'the body'}: {first['msg']}"
        return JSONResponse(error_body(said, _INVALID, place[0] if place else None), 400)

    @app.exception_handler(RunFailed)
    async def failed(request: Request, error: RunFailed) -> JSONResponse:
        return JSONResponse(error_body(str(error), "server_error"), 503)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        said = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(said, _INVALID), error.status_code)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(f"{type(error).__name__}: {error}", "server_error"), 500)


class _Server(uvicorn.Server):
    """Ends texts under way when it is told to end, so that nobody waits for them."""

    worker: Worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.worker.close()
        super().handle_exit(sig, frame)


def serve(worker: Worker, listening: socket.socket, name: str, api_key: str | None) -> None:
    """Answer requests until a signal ends it, which is raised once all are answered."""
    app = create_app(worker, name, api_key)
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    server.worker = worker
    try:
        server.run(sockets=[listening])
    finally:
        worker.close()
