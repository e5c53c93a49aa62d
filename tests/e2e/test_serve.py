"""OpenAI's client and a server of a model, over HTTP."""

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
from tests.chats import PLAIN, said
from tests.e2e.test_use_a_folder import save_llama
from tests.serving import NAME, Ascii, direct, random_model, served
from tests.tiers import tiered
from tests.unit.generation.small_models import FLURKA, MIXED

REPOSITORY = Path(__file__).parents[2]
MIXED_MODEL = {"attention_pattern": MIXED, "num_layers": 4}


def chatting(template=PLAIN, **parts):
    tokenizer = Ascii()
    tokenizer.chat_template = template
    return random_model(tokenizer, **parts or {"attention": FLURKA})


@pytest.fixture(scope="module")
def plain():
    """A server of kernel attention, softmax and windows."""
    with served(random_model(**MIXED_MODEL)) as server:
        yield server


@pytest.fixture(scope="module")
def chat():
    """One of a model with a chat template."""
    with served(chatting()) as server:
        yield server


def written(opened, tokens, count, seed=0, temperature=0.8, **options):
    """What the engine writes behind tokens, alone."""
    engine = GenerationEngine(opened.model, opened.tokenizer, isolate_documents=True)
    request = TextRequest(tokens, count, Sampling(temperature), seed, ends=opened.ends, **options)
    return "".join(step.piece for _, step in engine.run([request]))


def test_a_completion_is_the_text_of_generate(tmp_path, capsys):
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
        found = server.client.completions.create(
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
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == sum(map(len, prompts))
    assert len(set(expected)) == 4


def test_a_stream_carries_the_text_of_the_whole_answer(plain):
    asked = {
        "model": NAME,
        "prompt": ["one", "two"],
        "n": 2,
        "seed": 5,
        "max_tokens": 15,
        "stop": ["\x07"],
        "logprobs": 2,
    }
    whole = plain.client.completions.create(**asked)
    texts, tokens, finish = [""] * 4, [[] for _ in range(4)], [None] * 4
    stream = plain.client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
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


def test_a_chat_is_answered_through_the_template_and_streamed(chat):
    asked = {"model": NAME, "messages": said("hello"), "seed": 1, "max_completion_tokens": 12}
    options = {"logprobs": True, "top_logprobs": 3, "temperature": 0.8}
    whole = chat.client.chat.completions.create(**asked, **options)
    prompt = "user: hello\nassistant: "
    expected = written(chat.worker.opened, list(prompt.encode()), 12, seed=1)
    assert whole.choices[0].message.content == expected
    assert whole.usage.prompt_tokens == len(prompt)
    assert [len(token.top_logprobs) for token in whole.choices[0].logprobs.content] == [3] * 12
    first, *parts = chat.client.chat.completions.create(**asked, **options, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert parts[-1].choices[0].finish_reason == "length"
    blocks = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    again = chat.client.chat.completions.create(**{**asked, "messages": blocks}, temperature=0.8)
    assert again.choices[0].message.content == expected


def test_the_model_is_listed(plain):
    assert [model.id for model in plain.client.models.list()] == [NAME]
    assert plain.client.models.retrieve(NAME).id == NAME
    assert "<title>Megakernel</title>" in direct().get(plain.url).text


@pytest.mark.parametrize("count", tiered([10, 100], [10]))
def test_sessions_at_once_are_answered_as_each_alone(count, plain):
    opened = plain.worker.opened
    prompts = [f"{number} " + "x" * (number % 37) for number in range(count)]

    async def two_turns(client, number):
        texts = []
        for prompt in (prompts[number], " and "):
            found = await client.completions.create(
                model=NAME,
                prompt=prompt,
                max_tokens=5,
                seed=number,
                temperature=0.8,
                extra_body={"session": f"many-{count}-{number}"},
            )
            texts.append(found.choices[0].text)
        return texts

    async def everybody():
        http = openai.DefaultAsyncHttpx2Client(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="x", http_client=http) as client:
            return await asyncio.gather(*(two_turns(client, number) for number in range(count)))

    found = asyncio.run(everybody())
    for number, texts in enumerate(found):
        first = written(opened, Ascii().encode(prompts[number]), 5, seed=number)
        whole = Ascii().encode(prompts[number] + first + " and ")
        assert texts == [first, written(opened, whole, 5, seed=number)]
    kept = plain.get("/v1/sessions")["data"]
    assert {session["id"] for session in kept} >= {f"many-{count}-{number}" for number in range(count)}


def test_clients_that_go_away_free_their_states():
    with served(random_model(attention=FLURKA), batch_size=2) as server:
        asked = {"model": NAME, "prompt": "x", "max_tokens": 100_000}
        going = [server.client.completions.create(**asked, stream=True) for _ in range(3)]
        while [server.get("/health")[key] for key in ("running", "waiting")] != [2, 1]:
            pass
        for stream in going:  # under way, and waiting for its turn
            stream.close()
        with pytest.raises(openai.APITimeoutError):  # not streamed
            server.client.completions.create(**asked, timeout=0.5, extra_body={"session": "gone"})
        while any(server.get("/health")[key] for key in ("running", "waiting")):
            pass
        assert server.get("/v1/sessions")["data"] == []
        again = server.client.completions.create(
            model=NAME, prompt="x", max_tokens=2, extra_body={"session": "gone"}
        )
        assert again.usage.completion_tokens == 2


@pytest.mark.parametrize("parts", [{"attention": FLURKA}, MIXED_MODEL], ids=["flurka", "mixed"])
def test_a_session_stands_where_its_whole_text_does(parts):
    opened = random_model(**parts)
    with served(opened) as server:
        text = ""
        for prompt in ("Once upon a time ", "then ", "x" * 600):
            found = server.client.completions.create(
                model=NAME, prompt=prompt, max_tokens=20, temperature=0, extra_body={"session": "tale"}
            )
            new = found.usage.prompt_tokens - found.usage.prompt_tokens_details.cached_tokens
            assert new == len(prompt)
            text += prompt + found.choices[0].text
        ((_, session),) = server.worker.sessions.items()
    assert session.state.tokens == len(text)
    whole = GenerationEngine(opened.model, Ascii(), isolate_documents=True).new_decoder()
    whole.read([Ascii().encode(text)[:-1]])
    assert whole.positions == session.state.decoder.positions
    trees = (session.state.decoder.states, whole.states)
    found, expected = (dict(states.named_tensors(tree)) for tree in trees)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        # float32 sums over chunks that are cut elsewhere
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("sends", ["new", "everything"])
def test_a_conversation_goes_on_by_its_new_messages_alone(chat, sends):
    opened = chat.worker.opened
    messages, text, read = [], "", 0
    for turn, question in enumerate(("hello", "and then?", "well")):
        messages.append({"role": "user", "content": question})
        text += f"user: {question}\nassistant: "
        given = messages if sends == "everything" else messages[-1:]
        found = chat.client.chat.completions.create(
            model=NAME,
            messages=given,
            max_tokens=9,
            seed=turn,
            temperature=0.8,
            extra_body={"session": sends},
        )
        answer = found.choices[0].message.content
        assert found.usage.prompt_tokens_details.cached_tokens == read
        assert answer == written(opened, list(text.encode()), 9, seed=turn)
        read = found.usage.prompt_tokens + found.usage.completion_tokens
        messages.append(found.choices[0].message)  # as people do
        text += f"{answer}\n"


def test_a_template_that_writes_earlier_answers_otherwise_is_read_anew():
    shortens = PLAIN.replace("message.content", "message.content if loop.last else message.content[:2]")
    with served(chatting(shortens)) as server:
        asked = {"model": NAME, "max_tokens": 4, "extra_body": {"session": "s"}}
        server.client.chat.completions.create(**asked, messages=said("hi"))
        found = server.client.chat.completions.create(**asked, messages=said("more"))
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    assert found.usage.prompt_tokens == len("user: hi\nassistant: ab\nuser: more\nassistant: ")


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]
WRONG = [
    (
        COMPLETION,
        {"prompt": "x", "model": "gpt-9"},
        404,
        "model",
        "model 'gpt-9' is not served here; write 'small'",
    ),
    (COMPLETION, {}, 400, "prompt", "prompt: Field required"),
    (COMPLETION, {"prompt": {"a": 1}}, 400, "prompt", "prompt: Input should be a valid string"),
    (COMPLETION, [], 400, None, "the body: Input should be a valid dictionary"),
    (COMPLETION, {"prompt": []}, 400, "prompt", "prompt is an empty list; give a text"),
    (COMPLETION, {"prompt": [[]]}, 400, "prompt", "prompt is empty, and there is nothing to continue"),
    (COMPLETION, {"prompt": [1, 128]}, 400, "prompt", "prompt: tokens are from 0 to 127"),
    (COMPLETION, {"prompt": "\ud800"}, 400, None, "prompt is not valid UTF-8 at character 1"),
    (COMPLETION, {"prompt": ["x"] * 513}, 400, "prompt", "are too many for one request; send 512 at most"),
    (
        COMPLETION,
        {"prompt": "x", "temperature": -1},
        400,
        "temperature",
        "temperature=-1.0 cannot be; give 0",
    ),
    (
        COMPLETION,
        {"prompt": "x", "temperature": "hot"},
        400,
        "temperature",
        "temperature: Input should be a valid number",
    ),
    (COMPLETION, {"prompt": "x", "top_k": 2**70}, 400, "top_k", "top_k: Input should be less than"),
    (COMPLETION, {"prompt": "x", "min_p": float("nan")}, 400, "min_p", "min_p=nan is out of range"),
    (COMPLETION, {"prompt": "x", "top_p": 2}, 400, "top_p", "top_p=2.0 is out of range"),
    (COMPLETION, {"prompt": "x", "n": 0}, 400, "n", "n: Input should be greater than or equal to 1"),
    (
        COMPLETION,
        {"prompt": "x", "max_tokens": True},
        400,
        "max_tokens",
        "max_tokens: Input should be a valid integer",
    ),
    (
        COMPLETION,
        {"prompt": "x", "max_tokens": 65},
        400,
        "max_tokens",
        "of 1 tokens exceeds the model's 64 learned positions",
    ),
    (COMPLETION, {"prompt": "x" * 65}, 400, "max_tokens", "or a shorter prompt"),
    (
        COMPLETION,
        {"prompt": "x", "max_tokens": 100_001},
        400,
        "max_tokens",
        "exceeds this server's limit; give at most",
    ),
    (COMPLETION, {"prompt": "x", "stop": [""]}, 400, "stop", "stop: give up to 16 texts, none of them empty"),
    (
        COMPLETION,
        {"prompt": "x", "echo": True},
        400,
        "echo",
        "echo is not supported by this server; leave it out",
    ),
    (
        COMPLETION,
        {"prompt": "x", "temprature": 1},
        400,
        "temprature",
        "is not a field of this request; write temperature",
    ),
    (COMPLETION, {"prompt": "x", "session": "a/b"}, 400, "session", "session: String should match pattern"),
    (COMPLETION, {"prompt": "x", "session": "s", "n": 2}, 400, "session", "session keeps one text"),
    (CHAT, {"messages": []}, 400, "messages", "messages holds no message; write"),
    (
        CHAT,
        {"messages": [{"role": "robot", "content": "x"}]},
        400,
        "messages",
        "messages[0].role='robot' is unknown; write",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages",
        "content is no text",
    ),
    (
        CHAT,
        {"messages": USER, "tools": [{"type": "function"}]},
        400,
        "tools",
        "tools is not supported by this server",
    ),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, None, "the chat template rejects"),
    ("/v1/nothing", {}, 404, None, "POST /v1/nothing: Not Found"),
]


@pytest.fixture(scope="module")
def short():
    """A server of a model with 64 learned positions, whose template knows no tools."""
    refuses = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN
    with served(chatting(refuses, attention=FLURKA, position="learned", max_positions=64)) as server:
        yield server


@pytest.mark.parametrize(("path", "body", "status", "param", "said"), WRONG)
def test_what_cannot_be_is_an_error_of_openais_shape(short, path, body, status, param, said):
    with direct() as http:
        answer = http.post(
            f"{short.url}{path}", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert [short.get("/health")[key] for key in ("status", "running", "waiting")] == ["ok", 0, 0]


def test_an_answer_of_no_stated_length_fits_the_positions(short):
    found = short.client.chat.completions.create(model=NAME, messages=USER)
    assert found.usage.total_tokens == 65
    assert found.choices[0].finish_reason == "length"


def test_a_long_prompt_shortens_no_other_answer_of_its_request(short):
    def tokens(*prompts):
        return short.client.completions.create(model=NAME, prompt=list(prompts)).usage.completion_tokens

    long, brief = "x" * 60, "x"
    assert tokens(long) < tokens(brief)
    assert tokens(long, brief) == tokens(brief, long) == tokens(long) + tokens(brief)


def test_a_model_without_a_template_knows_no_messages(plain):
    with pytest.raises(openai.BadRequestError, match="has no chat_template, so it cannot render messages"):
        plain.client.chat.completions.create(model=NAME, messages=USER)


def test_whoever_has_no_key_is_turned_away():
    with served(random_model(attention=FLURKA), api_key="right") as server:
        assert server.client.completions.create(model=NAME, prompt="x").usage.completion_tokens == 16
        for wrong in ("wrong", "ключ"):
            with direct() as http:
                headers = {"Authorization": f"Bearer {wrong}".encode()}
                answer = http.get(f"{server.url}/v1/sessions", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.get("/health")["status"] == "ok"


def test_a_step_that_fails_ends_the_texts_in_it_and_not_the_server(plain, monkeypatch):
    def fails(self):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(GenerationEngine, "step", fails)
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            plain.client.completions.create(model=NAME, prompt="x", extra_body={"session": "failed"})
        with pytest.raises(openai.APIError, match="out of memory"):
            list(plain.client.completions.create(model=NAME, prompt="x", stream=True))
    found = plain.client.completions.create(model=NAME, prompt="x", extra_body={"session": "failed"})
    assert found.usage.completion_tokens == 16


def test_sessions_that_were_not_used_for_longest_are_forgotten_and_said_to_be():
    with served(random_model(attention=FLURKA), max_sessions=2) as server:
        client = server.client

        def go_on(name):
            return client.completions.create(
                model=NAME, prompt="x", max_tokens=1, extra_body={"session": name}
            )

        for name in ("a", "b", "a", "c"):
            go_on(name)
        assert [session["id"] for session in server.get("/v1/sessions")["data"]] == ["a", "c"]
        with pytest.raises(
            openai.NotFoundError, match="session b was forgotten, as 2 others were used since"
        ):
            go_on("b")
        client.delete("/sessions/b", cast_to=object)
        assert go_on("b").usage.prompt_tokens == 1
        for name in ("never", "a"):
            with pytest.raises(openai.NotFoundError, match=f"there is no session {name}|session {name} was"):
                client.get(f"/sessions/{name}/state", cast_to=object)
        with pytest.raises(openai.NotFoundError, match="there is no session never"):
            client.delete("/sessions/never", cast_to=object)


def test_a_session_answers_one_request_at_a_time(plain):
    asked = {"model": NAME, "prompt": "x", "extra_body": {"session": "busy"}}
    with (
        plain.client.completions.create(**asked, max_tokens=100_000, stream=True),
        pytest.raises(openai.ConflictError, match="session busy is answering another request"),
    ):
        plain.client.completions.create(**asked)


def test_a_text_and_a_conversation_are_not_gone_on_with_as_each_other(chat):
    chat.client.completions.create(model=NAME, prompt="x", extra_body={"session": "text"})
    with pytest.raises(openai.BadRequestError, match="is not a conversation; use /v1/completions"):
        chat.client.chat.completions.create(model=NAME, messages=USER, extra_body={"session": "text"})
    chat.client.chat.completions.create(
        model=NAME, messages=USER, max_tokens=1, extra_body={"session": "talk"}
    )
    with pytest.raises(openai.BadRequestError, match="is a conversation; use /v1/chat/completions"):
        chat.client.completions.create(model=NAME, prompt="x", extra_body={"session": "talk"})


def state(server, name):
    with direct() as http:
        return http.get(f"{server.url}/v1/sessions/{name}/state").content


def restore(server, name, data):
    with direct() as http:
        return http.put(f"{server.url}/v1/sessions/{name}/state", content=data)


@pytest.fixture(scope="module")
def saved(chat):
    """The state of a conversation that has begun."""
    asked = {"model": NAME, "messages": said("hello"), "seed": 0, "max_tokens": 40}
    chat.client.chat.completions.create(**asked, extra_body={"session": "saved"})
    return state(chat, "saved")


def test_a_state_goes_on_in_another_server_as_in_its_own(chat, saved):
    asked = {"model": NAME, "messages": said("and"), "seed": 1, "max_tokens": 20}
    expected = chat.client.chat.completions.create(**asked, extra_body={"session": "saved"})
    assert expected.usage.prompt_tokens_details.cached_tokens > 40
    with served(chatting()) as other:
        told = restore(other, "moved", saved).json()
        found = other.client.chat.completions.create(**asked, extra_body={"session": "moved"})
        assert told["tokens"] == expected.usage.prompt_tokens_details.cached_tokens
        assert state(other, "moved") == state(chat, "saved"), "bit for bit"
    assert found.choices[0].message.content == expected.choices[0].message.content
    assert found.usage == expected.usage
    assert len(saved) < 20_000


def rewritten(data, change):
    """A session's file with other tensors and text, whose checksum is right."""
    tensors = load(data)
    told = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["session"])
    del told["sha256"]
    change(tensors, told)
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode() + save(tensors)).hexdigest()
    return save(tensors, {"session": json.dumps({**told, "sha256": digest})})


def changed(**values):
    return lambda data: rewritten(data, lambda tensors, told: told.update(values))


def with_tensor(name, make):
    return lambda data: rewritten(data, lambda tensors, told: tensors.update({name: make(tensors[name])}))


SUMS = "0.far.sums"


@pytest.mark.parametrize(
    ("damaged", "said"),
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
        (changed(position=-1), "does not fit the model (ValueError)"),
        (changed(position=2**50, tokens=2**50), "does not fit the model (ValueError)"),
        (changed(tokens=1e400), "does not fit the model (OverflowError)"),
        (changed(unread=["x"]), "does not fit the model (ValueError)"),
        (changed(messages=[{"role": "robot"}]), "does not fit the model (UserError)"),
        (changed(context=None), "does not fit the model (TypeError)"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(chat, saved, damaged, said):
    before = state(chat, "saved")
    answer = restore(chat, "saved", damaged(saved))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_state")
    assert said in answer.json()["error"]["message"]
    assert state(chat, "saved") == before


def test_a_state_behind_the_learned_positions_is_refused(short):
    short.client.completions.create(model=NAME, prompt="x", extra_body={"session": "s"})
    answer = restore(short, "s", changed(position=64, tokens=64)(state(short, "s")))
    assert "does not fit the model (UserError)" in answer.json()["error"]["message"]


def test_a_state_of_another_model_is_refused(saved):
    with served(chatting(attention=FLURKA, num_layers=1)) as other:
        assert "it is of another model than the one served here" in restore(other, "s", saved).text


@contextmanager
def command(*options):
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
def test_the_command_serves_a_folder_and_a_session_moves_to_another_process(tmp_path):
    folder = save_llama(tmp_path / "llama", 257, byte_level(256, BPE_EOD), 256)
    (tmp_path / "key").write_text("secret\n")
    options = (folder, "--api-key-file", tmp_path / "key", "--name", "given")
    answers, states = [], []
    for round_ in range(2):
        with command(*options) as (process, url):
            client = openai.OpenAI(
                base_url=f"{url}/v1", api_key="secret", max_retries=0, http_client=direct()
            )
            asked = {"model": "given", "max_tokens": 8, "temperature": 0, "extra_body": {"session": "s"}}
            if round_ == 0:
                client.completions.create(**asked, prompt="def f(")
                states.append(
                    client.get("/sessions/s/state", cast_to=openai.HttpxBinaryResponseContent).content
                )
            else:
                with direct() as http:
                    headers = {"Authorization": "Bearer secret"}
                    http.put(
                        f"{url}/v1/sessions/s/state", content=states[0], headers=headers
                    ).raise_for_status()
            answers.append(client.completions.create(**asked, prompt=" and "))
            # Ctrl-C amid a text.
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
def test_a_port_in_use_is_one_line(tmp_path, capsys):
    folder = save_llama(tmp_path / "llama", 257, byte_level(256, BPE_EOD), 256)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"--host 127.0.0.1 --port {port} cannot be listened at" in line
