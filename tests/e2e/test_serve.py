"""The server, used over HTTP by OpenAI's client."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load, save

from data_pipeline.tokenizers import BPE_EOD, byte_level
from launch.cli import main
from launch.exit_status import ExitStatus
from megakernel.checkpoint.opened import find_model
from megakernel.generation import GenerationEngine, Sampling, TextRequest, states
from tests.chats import PLAIN, conversation
from tests.e2e.test_use_a_folder import save_llama
from tests.serving import NAME, Ascii, chat_model, http_client, random_model, served
from tests.tiers import tiered
from tests.unit.generation.small_models import FLURKA, MIXED

REPOSITORY = Path(__file__).parents[2]
MIXED_MODEL = {"attention_pattern": MIXED, "num_layers": 4}


@pytest.fixture(scope="module")
def plain():
    """A server of a model with kernel attention, softmax and windows, without a chat template."""
    with served(random_model(**MIXED_MODEL)) as server:
        yield server


@pytest.fixture(scope="module")
def chat():
    """A server of a model with a chat template."""
    with served(chat_model()) as server:
        yield server


def engine_text(opened, tokens, count, seed=0, temperature=0.8, **options):
    """The text that the engine generates after `tokens`, in a batch of its own."""
    engine = GenerationEngine(opened.model, opened.tokenizer, isolate_documents=True)
    request = TextRequest(tokens, count, Sampling(temperature), seed, ends=opened.ends, **options)
    return "".join(step.piece for _, step in engine.run([request]))


def test_completions_equal_the_texts_of_megakernel_generate(tmp_path, capsys):
    folder = save_llama(tmp_path / "llama", 257, byte_level(256, BPE_EOD), 256)
    capsys.readouterr()
    prompts = ["def f(", "import numpy as np\n" * 40]
    (tmp_path / "prompts").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    command = f"generate {folder} --prompts {tmp_path / 'prompts'} --samples 2 --seed 3 --max-new-tokens 12"
    options = "--temperature 0.9 --top-p 0.8 --min-p 0.01 --repetition-penalty 1.2 --stop ab"
    assert main([*command.split(), *options.split()]) == 0
    expected = [
        text for line in capsys.readouterr().out.splitlines() for text in json.loads(line)["continuations"]
    ]
    with served(find_model(folder)) as server:
        response = server.client.completions.create(
            model=NAME,
            prompt=prompts,
            n=2,
            seed=3,
            max_tokens=12,
            temperature=0.9,
            top_p=0.8,
            stop="ab",
            extra_body={"min_p": 0.01, "repetition_penalty": 1.2},
        )
    assert [choice.text for choice in response.choices] == expected
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.usage.prompt_tokens == sum(map(len, prompts))
    assert len(set(expected)) == 4


def test_a_stream_adds_up_to_the_answer_without_streaming(plain):
    request = {
        "model": NAME,
        "prompt": ["one", "two"],
        "n": 2,
        "seed": 5,
        "max_tokens": 15,
        "stop": ["\x07"],
        "logprobs": 2,
    }
    whole = plain.client.completions.create(**request)
    texts, tokens, finish = [""] * 4, [[] for _ in range(4)], [None] * 4
    stream = plain.client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    *parts, last = stream
    for part in parts:
        (choice,) = part.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
        finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert len(parts) > 15
    assert texts == [choice.text for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert last.choices == []
    assert last.usage == whole.usage
    assert whole.usage.completion_tokens == sum(map(len, tokens))


def test_a_chat_is_answered_in_the_template_and_can_be_streamed(chat):
    request = {"model": NAME, "messages": conversation("hello"), "seed": 1, "max_completion_tokens": 12}
    options = {"logprobs": True, "top_logprobs": 3, "temperature": 0.8}
    whole = chat.client.chat.completions.create(**request, **options)
    prompt = "user: hello\nassistant: "
    expected = engine_text(chat.worker.opened, list(prompt.encode()), 12, seed=1)
    assert whole.choices[0].message.content == expected
    assert whole.usage.prompt_tokens == len(prompt)
    assert [len(token.top_logprobs) for token in whole.choices[0].logprobs.content] == [3] * 12
    first, *parts = chat.client.chat.completions.create(**request, **options, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert parts[-1].choices[0].finish_reason == "length"
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    again = chat.client.chat.completions.create(**{**request, "messages": blocks}, temperature=0.8)
    assert again.choices[0].message.content == expected


def test_the_server_lists_its_model(plain):
    assert [model.id for model in plain.client.models.list()] == [NAME]
    assert plain.client.models.retrieve(NAME).id == NAME
    assert "<title>Megakernel</title>" in http_client().get(plain.url).text


@pytest.mark.parametrize("count", tiered([10, 100], [10]))
def test_concurrent_sessions_get_the_same_answers_as_one_alone(count, plain):
    opened = plain.worker.opened
    prompts = [f"{number} " + "x" * (number % 37) for number in range(count)]

    async def two_turns(client, number):
        texts = []
        for prompt in (prompts[number], " and "):
            answers = await client.completions.create(
                model=NAME,
                prompt=prompt,
                max_tokens=5,
                seed=number,
                temperature=0.8,
                extra_body={"session": f"many-{count}-{number}"},
            )
            texts.append(answers.choices[0].text)
        return texts

    async def all_sessions():
        http = openai.DefaultAsyncHttpx2Client(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="x", http_client=http) as client:
            return await asyncio.gather(*(two_turns(client, number) for number in range(count)))

    answers = asyncio.run(all_sessions())
    for number, texts in enumerate(answers):
        first = engine_text(opened, Ascii().encode(prompts[number]), 5, seed=number)
        whole = Ascii().encode(prompts[number] + first + " and ")
        assert texts == [first, engine_text(opened, whole, 5, seed=number)]
    sessions = plain.get("/v1/sessions")["data"]
    assert {session["id"] for session in sessions} >= {f"many-{count}-{number}" for number in range(count)}


def test_clients_that_disconnect_free_their_states():
    with served(random_model(attention=FLURKA), batch_size=2) as server:
        request = {"model": NAME, "prompt": "x", "max_tokens": 100_000}
        streams = [server.client.completions.create(**request, stream=True) for _ in range(3)]
        while [server.get("/health")[key] for key in ("running", "waiting")] != [2, 1]:
            pass
        for stream in streams:  # two are running, one is waiting
            stream.close()
        with pytest.raises(openai.APITimeoutError):  # not streamed
            server.client.completions.create(**request, timeout=0.5, extra_body={"session": "gone"})
        while any(server.get("/health")[key] for key in ("running", "waiting")):
            pass
        assert server.get("/v1/sessions")["data"] == []
        again = server.client.completions.create(
            model=NAME, prompt="x", max_tokens=2, extra_body={"session": "gone"}
        )
        assert again.usage.completion_tokens == 2


@pytest.mark.parametrize("parts", [{"attention": FLURKA}, MIXED_MODEL], ids=["flurka", "mixed"])
def test_a_sessions_state_equals_that_of_its_whole_text(parts):
    opened = random_model(**parts)
    with served(opened) as server:
        text = ""
        for prompt in ("Once upon a time ", "then ", "x" * 600):
            response = server.client.completions.create(
                model=NAME, prompt=prompt, max_tokens=20, temperature=0, extra_body={"session": "tale"}
            )
            new = response.usage.prompt_tokens - response.usage.prompt_tokens_details.cached_tokens
            assert new == len(prompt)
            text += prompt + response.choices[0].text
        ((_, session),) = server.worker.sessions.items()
    assert session.state.tokens == len(text)
    whole = GenerationEngine(opened.model, Ascii(), isolate_documents=True).new_decoder()
    whole.read([Ascii().encode(text)[:-1]])
    assert whole.positions == session.state.decoder.positions
    trees = (session.state.decoder.states, whole.states)
    actual, expected = (dict(states.named_tensors(tree)) for tree in trees)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        # float32 sums over other chunks
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("sends", ["new", "everything"])
def test_a_session_reads_only_the_new_messages_of_a_conversation(chat, sends):
    opened = chat.worker.opened
    messages, text, read = [], "", 0
    for turn, question in enumerate(("hello", "and then?", "well")):
        messages.append({"role": "user", "content": question})
        text += f"user: {question}\nassistant: "
        sent = messages if sends == "everything" else messages[-1:]
        response = chat.client.chat.completions.create(
            model=NAME,
            messages=sent,
            max_tokens=9,
            seed=turn,
            temperature=0.8,
            extra_body={"session": sends},
        )
        answer = response.choices[0].message.content
        assert response.usage.prompt_tokens_details.cached_tokens == read
        assert answer == engine_text(opened, list(text.encode()), 9, seed=turn)
        read = response.usage.prompt_tokens + response.usage.completion_tokens
        messages.append(response.choices[0].message)  # the client's own object, as users pass it
        text += f"{answer}\n"


def test_a_template_that_rewrites_earlier_answers_is_read_from_the_start():
    shortening = PLAIN.replace("message.content", "message.content if loop.last else message.content[:2]")
    with served(chat_model(shortening)) as server:
        request = {"model": NAME, "max_tokens": 4, "extra_body": {"session": "s"}}
        server.client.chat.completions.create(**request, messages=conversation("hi"))
        response = server.client.chat.completions.create(**request, messages=conversation("more"))
    assert response.usage.prompt_tokens_details.cached_tokens == 0
    assert response.usage.prompt_tokens == len("user: hi\nassistant: ab\nuser: more\nassistant: ")


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
INVALID_FIELDS = [
    ({"prompt": {"a": 1}}, "prompt", "prompt: Input should be a valid string"),
    ({"prompt": []}, "prompt", "prompt is an empty list; give a text"),
    ({"prompt": [[]]}, "prompt", "prompt is empty, and there is nothing to continue"),
    ({"prompt": [1, 128]}, "prompt", "prompt: tokens are from 0 to 127"),
    ({"prompt": "\ud800"}, None, "prompt is not valid UTF-8 at character 1"),
    ({"prompt": ["x"] * 513}, "prompt", "are too many for one request; send 512 texts at most"),
    ({"temperature": -1}, "temperature", "temperature=-1.0 is out of range; give 0"),
    ({"temperature": "hot"}, "temperature", "temperature: Input should be a valid number"),
    ({"top_k": 2**70}, "top_k", "top_k: Input should be less than"),
    ({"min_p": float("nan")}, "min_p", "min_p=nan is out of range"),
    ({"top_p": 2}, "top_p", "top_p=2.0 is out of range"),
    ({"n": 0}, "n", "n: Input should be greater than or equal to 1"),
    ({"max_tokens": True}, "max_tokens", "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 65}, "max_tokens", "of 1 tokens exceeds the model's 64 learned positions"),
    ({"prompt": "x" * 65}, "max_tokens", "or a shorter prompt"),
    ({"max_tokens": 100_001}, "max_tokens", "exceeds this server's limit; give at most"),
    ({"stop": [""]}, "stop", "stop: give up to 16 texts, none of them empty"),
    ({"best_of": 2}, "best_of", "best_of is not supported by this server; leave it out"),
    ({"temprature": 1}, "temprature", "is not a field of this request; write temperature"),
    (
        {"stream": True, "stream_options": {"include_usages": True}},
        "stream_options",
        "stream_options.include_usages is not a field; write include_usage",
    ),
    ({"session": "a/b"}, "session", "session: String should match pattern"),
    ({"session": "."}, "session", "session: String should match pattern"),
    ({"session": ".."}, "session", "session: String should match pattern"),
    ({"session": "x" * 65}, "session", "session: String should have at most 64 characters"),
    ({"quality": "high"}, "quality", "quality is not a field of this request; leave it out"),
    ({"x" * 9_000_000: 1}, "x" * 64 + "...", "xxx... is not a field of this request; leave it out"),
    ({"prompt": [1, "x"] * 500_000}, "prompt", "prompt.1: Input should be a valid integer"),
    ({"stop": [1] * 1_000_000}, "stop", "stop"),
    ({"session": "s", "n": 2}, "session", "session keeps one text"),
]
"""Fields of a completion besides `prompt: x` -> the field that is named, and a part of the message."""

IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
INVALID_REQUESTS = [
    *((COMPLETION, {"prompt": "x"} | fields, 400, *rest) for fields, *rest in INVALID_FIELDS),
    (
        COMPLETION,
        {"prompt": "x", "model": "gpt-9"},
        404,
        "model",
        "'gpt-9' is not served here; write 'small'",
    ),
    (COMPLETION, {}, 400, "prompt", "prompt: Field required"),
    (COMPLETION, [], 400, None, "the body: Input should be a valid dictionary"),
    (CHAT, {"messages": []}, 400, "messages", "messages holds no message; write"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages", "[0].role='robot' is unknown"),
    (CHAT, {"messages": IMAGE}, 400, "messages", "content is not a string"),
    (CHAT, {"messages": USER, "tools": [{}]}, 400, "tools", "tools is not supported by this server"),
    (
        CHAT,
        {"messages": USER, "top_logprobs": 2},
        400,
        "top_logprobs",
        "has no effect alone; add logprobs=true",
    ),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, None, "the chat template rejects"),
    ("/v1/nothing", {}, 404, None, "POST /v1/nothing: Not Found"),
]


@pytest.fixture(scope="module")
def short():
    """A server of a model with 64 learned positions, whose template rejects tool messages."""
    refuses = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN
    with served(chat_model(refuses, attention=FLURKA, position="learned", max_positions=64)) as server:
        yield server


@pytest.mark.parametrize(("path", "body", "status", "param", "explanation"), INVALID_REQUESTS)
def test_invalid_requests_get_an_openai_error(short, path, body, status, param, explanation):
    with http_client() as http:
        answer = http.post(
            f"{short.url}{path}", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert explanation in error["message"]
    assert "\n" not in error["message"]
    assert [short.get("/health")[key] for key in ("status", "running", "waiting")] == ["ok", 0, 0]


def test_without_max_tokens_an_answer_ends_at_the_last_learned_position(short):
    response = short.client.chat.completions.create(model=NAME, messages=USER)
    assert response.usage.total_tokens == 65
    assert response.choices[0].finish_reason == "length"


def test_a_long_prompt_does_not_shorten_the_other_answers_of_its_request(short):
    def tokens(*prompts):
        return short.client.completions.create(model=NAME, prompt=list(prompts)).usage.completion_tokens

    long, brief = "x" * 60, "x"
    assert tokens(long) < tokens(brief)
    assert tokens(long, brief) == tokens(brief, long) == tokens(long) + tokens(brief)


def test_a_model_without_a_chat_template_refuses_messages(plain):
    with pytest.raises(openai.BadRequestError, match="has no chat_template, so it cannot render messages"):
        plain.client.chat.completions.create(model=NAME, messages=USER)


def test_requests_without_the_api_key_are_refused():
    with served(random_model(attention=FLURKA), api_key="right") as server:
        assert server.client.completions.create(model=NAME, prompt="x").usage.completion_tokens == 16
        for wrong in ("wrong", "ключ"):
            with http_client() as http:
                headers = {"Authorization": f"Bearer {wrong}".encode()}
                answer = http.get(f"{server.url}/v1/sessions", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.get("/health")["status"] == "ok"


def test_a_failing_step_ends_its_requests_but_not_the_server(plain, monkeypatch):
    def fail(self):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(GenerationEngine, "step", fail)
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            plain.client.completions.create(model=NAME, prompt="x", extra_body={"session": "failed"})
        with pytest.raises(openai.APIError, match="out of memory"):
            list(plain.client.completions.create(model=NAME, prompt="x", stream=True))
    response = plain.client.completions.create(model=NAME, prompt="x", extra_body={"session": "failed"})
    assert response.usage.completion_tokens == 16


def test_a_failing_removal_of_a_text_ends_the_others_but_not_the_server(monkeypatch):
    def fail(self, text):
        raise RuntimeError("out of memory")

    request = {"model": NAME, "prompt": "x", "max_tokens": 100_000, "stream": True, "timeout": 20}
    with served(random_model(attention=FLURKA)) as server:
        gone, other = (server.client.completions.create(**request) for _ in range(2))
        next(iter(gone))
        with monkeypatch.context() as patched:
            patched.setattr(GenerationEngine, "remove", fail)
            gone.close()
            with pytest.raises(openai.APIError, match="out of memory"):
                list(other)
        response = server.client.completions.create(model=NAME, prompt="x")
        assert response.usage.completion_tokens == 16


def test_least_recently_used_sessions_are_evicted_with_a_clear_error():
    with served(random_model(attention=FLURKA), max_sessions=2) as server:
        client = server.client

        def continue_session(name):
            return client.completions.create(
                model=NAME, prompt="x", max_tokens=1, extra_body={"session": name}
            )

        for name in ("a", "b", "a", "c"):
            continue_session(name)
        assert [session["id"] for session in server.get("/v1/sessions")["data"]] == ["a", "c"]
        with pytest.raises(
            openai.NotFoundError, match="session b was forgotten, as 2 others were used since"
        ):
            continue_session("b")
        client.delete("/sessions/b", cast_to=object)
        assert continue_session("b").usage.prompt_tokens == 1
        for name in ("never", "a"):
            with pytest.raises(openai.NotFoundError, match=f"there is no session {name}|session {name} was"):
                client.get(f"/sessions/{name}/state", cast_to=object)
        with pytest.raises(openai.NotFoundError, match="there is no session never"):
            client.delete("/sessions/never", cast_to=object)


@pytest.mark.parametrize(
    "parts", [{"attention": "softmax"}, {"attention": FLURKA}], ids=["softmax", "flurka"]
)
def test_a_sessions_sizes_are_those_of_its_tensors_and_of_a_softmax_cache(parts):
    """The counted cache is the measured one where the model has softmax in every layer."""
    with served(random_model(**parts)) as server:
        request = {
            "model": NAME,
            "prompt": "Once upon a time",
            "max_tokens": 20,
            "extra_body": {"session": "a"},
        }
        assert server.client.completions.create(**request).usage.completion_tokens == 20
        info = server.get("/v1/sessions/a")
        assert info == server.get("/v1/sessions")["data"][0]
        assert info["softmax_bytes"] == info["softmax_bytes_per_token"] * 35, "the last token is not read yet"
        assert info["tokens_per_second"] > 0
        tensors = load(session_state(server, "a"))
        assert info["bytes"] == sum(x.nbytes for name, x in tensors.items() if name != "seen")
        assert (info["bytes"] == info["softmax_bytes"]) == (parts["attention"] == "softmax")
        server.client.completions.create(**request | {"max_tokens": 1})
        assert server.get("/v1/sessions/a")["tokens_per_second"] is None, "one token has no speed"
        with pytest.raises(openai.NotFoundError, match="there is no session never"):
            server.client.get("/sessions/never", cast_to=object)


def test_a_session_answers_one_request_at_a_time(plain):
    request = {"model": NAME, "prompt": "x", "extra_body": {"session": "busy"}}
    with (
        plain.client.completions.create(**request, max_tokens=100_000, stream=True),
        pytest.raises(openai.ConflictError, match="session busy is answering another request"),
    ):
        plain.client.completions.create(**request)


def test_a_text_session_refuses_messages_and_a_chat_session_refuses_prompts(chat):
    chat.client.completions.create(model=NAME, prompt="x", extra_body={"session": "text"})
    with pytest.raises(openai.BadRequestError, match="is not a conversation; use /v1/completions"):
        chat.client.chat.completions.create(model=NAME, messages=USER, extra_body={"session": "text"})
    chat.client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=1, extra_body={"session": "talk"}
    )
    with pytest.raises(openai.BadRequestError, match="is a conversation; use /v1/chat/completions"):
        chat.client.completions.create(model=NAME, prompt="x", extra_body={"session": "talk"})


def session_state(server, name):
    with http_client() as http:
        return http.get(f"{server.url}/v1/sessions/{name}/state").content


def restore(server, name, data):
    with http_client() as http:
        return http.put(f"{server.url}/v1/sessions/{name}/state", content=data)


@pytest.fixture(scope="module")
def saved_state(chat):
    """The state of a session after one turn of a conversation."""
    request = {"model": NAME, "messages": conversation("hello"), "seed": 0, "max_tokens": 40}
    chat.client.chat.completions.create(**request, extra_body={"session": "saved"})
    return session_state(chat, "saved")


def test_a_session_continues_on_another_server_with_the_same_answers(chat, saved_state):
    request = {"model": NAME, "messages": conversation("and"), "seed": 1, "max_tokens": 20}
    expected = chat.client.chat.completions.create(**request, extra_body={"session": "saved"})
    assert expected.usage.prompt_tokens_details.cached_tokens > 40
    with served(chat_model()) as other:
        restored = restore(other, "moved", saved_state).json()
        response = other.client.chat.completions.create(**request, extra_body={"session": "moved"})
        assert restored["tokens"] == expected.usage.prompt_tokens_details.cached_tokens
        assert session_state(other, "moved") == session_state(chat, "saved"), "bit for bit"
    assert response.choices[0].message.content == expected.choices[0].message.content
    assert response.usage == expected.usage
    assert len(saved_state) < 20_000


def rewrite(data, change):
    """A session file with changed tensors or metadata and a correct checksum."""
    tensors = load(data)
    metadata = json.loads(
        json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["session"]
    )
    del metadata["sha256"]
    change(tensors, metadata)
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode() + save(tensors)).hexdigest()
    return save(tensors, {"session": json.dumps({**metadata, "sha256": digest})})


def with_metadata(**values):
    return lambda data: rewrite(data, lambda tensors, metadata: metadata.update(values))


def with_tensor(name, make):
    return lambda data: rewrite(data, lambda tensors, metadata: tensors.update({name: make(tensors[name])}))


SUMS = "0.far.sums"


@pytest.mark.parametrize(
    ("damage", "explanation"),
    [
        (lambda data: b"", "it is damaged, or not a safetensors file"),
        (lambda data: b"\x80\x04\x95" + b"pickle" * 9, "it is damaged, or not a safetensors file"),
        (lambda data: data[:-8], "it is damaged, or not a safetensors file"),
        (lambda data: data[:-8] + b"\0" * 8, "it is damaged: its SHA-256 does not match"),
        (lambda data: data.replace(b"hello", b"Hello"), "it is damaged: its SHA-256 does not match"),
        (
            lambda data: data.replace(b"megakernel session 1", b"megakernel session 2"),
            "it is not a session file",
        ),
        (with_tensor(SUMS, lambda x: x[..., :-1].contiguous()), "does not fit the model (ValueError)"),
        (with_tensor(SUMS, lambda x: x.double()), "does not fit the model (ValueError)"),
        (with_tensor(SUMS, lambda x: x / 0), "does not fit the model (ValueError)"),
        (with_tensor("seen", lambda x: x + 1000), "does not fit the model (ValueError)"),
        (with_metadata(position=-1), "does not fit the model (ValueError)"),
        (with_metadata(position=2**50, tokens=2**50), "does not fit the model (ValueError)"),
        (with_metadata(position=2**39, tokens=2**39), "position=549755813888 is not an integer from 0 to"),
        (with_metadata(position=3.7), "position=3.7 is not an integer from 0 to 2,147,483,647"),
        (with_metadata(position="5"), "position='5' is not an integer"),
        (with_metadata(tokens=True), "tokens=True is not an integer"),
        (with_metadata(tokens=1e400), "tokens=inf is not an integer"),
        (with_metadata(position=9, tokens=8), "after 8 tokens it has the position 9"),
        (with_metadata(context=[65] * 9), "it has the position"),
        (with_metadata(unread=[65] * 200_000), "it has 200,000 unread tokens, and an ended text has at most"),
        (with_tensor("seen", lambda x: x.repeat(99)), "does not fit the model (ValueError)"),
        (with_metadata(unread=["x"]), "does not fit the model (ValueError)"),
        (with_metadata(messages=[{"role": "robot"}]), "does not fit the model (UserError)"),
        (with_metadata(context=None), "does not fit the model (TypeError)"),
    ],
)
def test_an_invalid_session_file_is_refused_and_changes_nothing(chat, saved_state, damage, explanation):
    before = session_state(chat, "saved")
    answer = restore(chat, "saved", damage(saved_state))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_state")
    assert explanation in answer.json()["error"]["message"]
    assert session_state(chat, "saved") == before


def test_a_session_file_beyond_the_learned_positions_is_refused(short):
    short.client.completions.create(model=NAME, prompt="x", extra_body={"session": "s"})
    answer = restore(short, "s", with_metadata(position=64, tokens=64)(session_state(short, "s")))
    assert "does not fit the model (UserError)" in answer.json()["error"]["message"]


def test_a_session_file_of_another_model_is_refused(saved_state):
    with served(chat_model(attention=FLURKA, num_layers=1)) as other:
        assert "it is of another model than the one served here" in restore(other, "s", saved_state).text


@contextmanager
def serve_process(*options):
    """A process of `megakernel serve`, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "serve", *map(str, options), "--port", "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = next(line for line in process.stdout if " at http://" in line)
        yield process, line.split(" at ")[1].split()[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.second
def test_a_session_of_megakernel_serve_can_be_moved_to_another_process(tmp_path):
    folder = save_llama(tmp_path / "llama", 257, byte_level(256, BPE_EOD), 256)
    (tmp_path / "key").write_text("secret\n")
    options = (folder, "--api-key-file", tmp_path / "key", "--name", "given")
    answers, states = [], []
    for round_ in range(2):
        with serve_process(*options) as (process, url):
            client = openai.OpenAI(
                base_url=f"{url}/v1", api_key="secret", max_retries=0, http_client=http_client()
            )
            request = {"model": "given", "max_tokens": 8, "temperature": 0, "extra_body": {"session": "s"}}
            if round_ == 0:
                client.completions.create(**request, prompt="def f(")
                states.append(
                    client.get("/sessions/s/state", cast_to=openai.HttpxBinaryResponseContent).content
                )
            else:
                with http_client() as http:
                    headers = {"Authorization": "Bearer secret"}
                    http.put(
                        f"{url}/v1/sessions/s/state", content=states[0], headers=headers
                    ).raise_for_status()
            answers.append(client.completions.create(**request, prompt=" and "))
            # Ctrl-C while a text is streamed.
            stream = client.completions.create(model="given", prompt="x", max_tokens=200, stream=True)
            next(iter(stream))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert out.endswith("ended\n")
            assert "Traceback" not in err
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].usage == answers[1].usage
    assert answers[0].usage.prompt_tokens_details.cached_tokens == len("def f(") + 8


@pytest.mark.second
def test_a_port_in_use_is_a_one_line_error(tmp_path, capsys):
    folder = save_llama(tmp_path / "llama", 257, byte_level(256, BPE_EOD), 256)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"--host 127.0.0.1 --port {port} cannot be listened on" in line
