"""What the server refuses of requests: too large, too slow, for another host; and what goes on meanwhile."""

import json
import socket
import threading

import openai
import pytest
from pydantic import ValidationError

from megakernel.generation import GenerationEngine, TextRequest
from megakernel.generation.engine import PROMPT_CHUNK
from megakernel.generation.serving.gate import Hosts, Limits
from megakernel.generation.serving.protocol import ChatBody, CompletionBody
from tests.serving import NAME, Ascii, Served, http_client, random_model, served
from tests.unit.generation.small_models import FLURKA

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def small():
    """A server with small limits."""
    limits = Limits(request_bytes=1000, state_bytes=2000, read_seconds=0.5)
    with served(random_model(attention=FLURKA), limits=limits, hosts=Hosts(["proxy.example"])) as server:
        yield server


def send(server: Served, text: str) -> bytes:
    """What the server answers to bytes on a new connection, until it closes that."""
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=60) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("proxy.example:443", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("10.0.0.1:8000", 403),
        ("0.0.0.0:8000", 403),
        ("", 403),
    ],
)
def test_only_requests_for_this_machines_own_names_are_answered(small, host, status):
    for path in ("/health", "/v1/sessions", "/"):
        answer = send(small, f"GET {path} HTTP/1.1\nHost: {host}\nConnection: close\n\n")
        assert int(answer.split()[1]) == status, path
        if status == 403:
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "host_not_allowed"
            assert (
                "is not a name of this server; write localhost, or start it with --allow-host NAME"
                in (error["message"])
            )


def test_any_name_reaches_a_server_for_the_network():
    with served(random_model(attention=FLURKA), hosts=None) as server:
        assert (
            send(server, "GET /health HTTP/1.1\nHost: my.cluster\nConnection: close\n\n").split()[1] == b"200"
        )


@pytest.mark.parametrize("is_chunked", [False, True], ids=["with its length", "in chunks"])
def test_a_request_over_the_limit_is_refused_with_413_and_the_limit(small, is_chunked):
    body = json.dumps({"prompt": "x" * 300_000, "max_tokens": 1}).encode()
    with http_client() as http:
        content = iter([body[:500], body[500:]]) if is_chunked else body
        headers = {"Content-Type": "application/json"}
        answer = http.post(f"{small.url}{COMPLETIONS}", content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == (
            "the body is larger than this server's limit of 1,000 bytes (--max-request-mib); send less"
        )
        answer = http.put(f"{small.url}/v1/sessions/s/state", content=body)
        assert answer.status_code == 413
        assert "limit of 2,000 bytes (--max-state-mib)" in answer.json()["error"]["message"]
        assert http.get(f"{small.url}/health").json()["status"] == "ok"


def test_a_request_over_the_limit_is_refused_before_it_is_sent(small):
    header = f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
    assert send(small, f"{header}Connection: close\nContent-Length: 9999999999\n\n").split()[1] == b"413"


def test_a_body_that_never_ends_is_answered_and_its_connection_closed(small):
    header = f"POST {COMPLETIONS} HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
    answer = send(small, header + 'Content-Length: 100\n\n{"prompt"')
    assert answer.split()[1] == b"408"
    assert b"did not arrive within 0.5 s (--read-timeout)" in answer


@pytest.mark.parametrize("text", ["", "GET /health HT", "GET /health HTTP/1.1\nHost: localhost\n"])
def test_a_connection_without_a_whole_header_is_closed(small, text):
    assert send(small, text) == b""


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_that_is_not_declared_as_json_is_refused_with_the_header_to_send(small, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    with http_client() as http:
        answer = http.post(f"{small.url}{COMPLETIONS}", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    message = answer.json()["error"]["message"]
    assert (content_type or "no Content-Type") in message
    assert "curl: -H 'Content-Type: application/json'" in message


def test_head_is_answered_wherever_get_is(small):
    with http_client() as http:
        for path in ("/health", "/", "/v1/models", "/v1/sessions"):
            answer = http.head(f"{small.url}{path}")
            assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("name", [".", "..", "%2E%2E"])
def test_sessions_have_no_names_that_paths_drop(small, name):
    line = f"GET /v1/sessions/{name}/state HTTP/1.1\nHost: localhost\nConnection: close\n\n"
    answer = send(small, line)
    assert answer.split()[1] == b"400"
    assert b"session: String should match pattern" in answer


class Slow(Ascii):
    """Its long texts wait until `go_on` is set."""

    began, go_on = threading.Event(), threading.Event()

    def encode_batch(self, texts):
        if any(len(text) > 100_000 for text in texts):
            self.began.set()
            assert self.go_on.wait(60)
        return super().encode_batch(texts)


def test_a_long_prompt_holds_up_neither_the_server_nor_short_prompts():
    refusals = []
    opened = random_model(Slow(), attention=FLURKA, position="learned", max_positions=64)
    with served(opened) as server:

        def long_request():
            with pytest.raises(openai.BadRequestError) as raised:
                server.client.completions.create(model=NAME, prompt="x" * 200_000)
            refusals.append(str(raised.value))

        thread = threading.Thread(target=long_request)
        thread.start()
        try:
            assert Slow.began.wait(60)
            assert server.get("/health")["status"] == "ok"
            assert server.client.completions.create(model=NAME, prompt="x").usage.completion_tokens == 16
            assert refusals == []
        finally:
            Slow.go_on.set()
            thread.join()
    assert "after a prompt of 200000 tokens exceeds the model's 64 learned positions" in refusals[0]


def test_a_long_prompt_is_not_copied_for_each_chunk_that_is_read():
    opened = random_model(attention=FLURKA)
    engine = GenerationEngine(opened.model, opened.tokenizer, isolate_documents=True)
    text = engine.add(TextRequest([65] * (3 * PROMPT_CHUNK), 1))
    tokens = text.unread
    engine.step()
    assert text.unread is tokens
    while text.finish is None:
        engine.step()
    assert len(text.new_tokens) == 1


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [1, "x"] * 1000}),
        (CompletionBody, {"prompt": ["x", 1] * 1000}),
        (CompletionBody, {"prompt": [[1], ["x"]] * 1000}),
        (CompletionBody, {"prompt": "x", "stop": [1] * 1000}),
        (ChatBody, {"messages": [1] * 1000}),
    ],
)
def test_a_list_with_many_wrong_items_has_few_errors(kind, fields):
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(fields)
    assert raised.value.error_count() <= 2
