"""`echo`: the server returns the prompt, and with `logprobs` the log-probabilities of its tokens."""

from dataclasses import dataclass

import openai
import pytest
import torch

from data_pipeline.tokenizers import ByteTokenizer
from tests.serving import NAME, RandomModel, chat_model, random_model, served
from tests.unit.generation.small_models import FLURKA, MIXED

PROMPT = "def f(x):\n    return é"
LONG = "import numpy as np\n" * 60
"""More tokens than the engine reads at once."""


@pytest.fixture(scope="module")
def opened():
    return random_model(ByteTokenizer(), attention_pattern=MIXED, num_layers=4)


@pytest.fixture(scope="module")
def server(opened):
    with served(opened) as server:
        yield server


@torch.no_grad()
def reference(opened, ids):
    """Log-probabilities (N - 1, V) of every token after the first."""
    model = opened.model
    hidden = model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None])
    return model.logits(hidden)[0, :-1, : opened.tokenizer.vocab_size].log_softmax(-1)


def complete(server, **request):
    return server.client.completions.create(**{"model": NAME, "prompt": PROMPT, "seed": 1, **request})


# 1e-3: logits of the recurrent form in chunks against those of the whole sequence, float32.
TOLERANCE = 1e-3


@pytest.mark.parametrize("prompt", [PROMPT, LONG])
def test_a_prompt_alone_has_the_models_log_probabilities(server, opened, prompt):
    (choice,) = complete(server, prompt=prompt, max_tokens=0, echo=True, logprobs=2).choices
    ids = list(prompt.encode())
    found, expected = choice.logprobs, reference(opened, ids)
    assert (choice.text, choice.finish_reason) == (prompt, "length")
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(ids)
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    own = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.token_logprobs[1:]), own, atol=TOLERANCE, rtol=0)
    best = torch.tensor([max(top.values()) for top in found.top_logprobs[1:]])
    torch.testing.assert_close(best, expected.max(-1).values, atol=TOLERANCE, rtol=0)
    assert all(found.tokens[i] in found.top_logprobs[i] for i in range(1, len(ids)))


def test_offsets_count_the_characters_of_the_prompt_and_its_continuation(server):
    (choice,) = complete(server, max_tokens=5, echo=True, logprobs=0).choices
    found = choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert len(found.tokens) == len(PROMPT.encode()) + 5
    assert found.text_offset[: len(PROMPT)] == list(range(len(PROMPT)))
    assert found.text_offset[len(PROMPT.encode())] == len(PROMPT)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_continuation_is_the_one_without_echo(server, logprobs):
    plain = complete(server, max_tokens=9, n=2, logprobs=logprobs)
    echoed = complete(server, max_tokens=9, n=2, logprobs=logprobs, echo=True)
    assert [one.text for one in echoed.choices] == [PROMPT + one.text for one in plain.choices]
    assert echoed.usage == plain.usage
    for one, other in zip(echoed.choices, plain.choices, strict=True):
        if logprobs is None:
            assert one.logprobs is None
        else:
            assert one.logprobs.token_logprobs[-9:] == pytest.approx(
                other.logprobs.token_logprobs, abs=TOLERANCE
            )


def test_prompts_of_tokens_are_returned_as_their_text(server, opened):
    prompts = [list(b"import os"), list("é".encode()) * 300, [256, *b"x = "]]
    choices = complete(server, prompt=prompts, max_tokens=0, echo=True, logprobs=1).choices
    assert [choice.text for choice in choices] == ["import os", "é" * 300, "x = "]
    for choice, ids in zip(choices, prompts, strict=True):
        assert len(choice.logprobs.token_logprobs) == len(ids)
    # A document that has ended takes no characters, and a new one begins after it.
    assert choices[2].logprobs.tokens[0] == "<|endoftext|>"
    assert choices[2].logprobs.text_offset == [0, 0, 1, 2, 3]
    alone = complete(server, prompt=[list(b"x = ")], max_tokens=0, echo=True, logprobs=1).choices[0].logprobs
    assert choices[2].logprobs.token_logprobs[2:] == pytest.approx(alone.token_logprobs[1:], abs=TOLERANCE)


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_stream_begins_with_the_prompt(server, max_tokens):
    whole = complete(server, prompt=LONG, max_tokens=max_tokens, echo=True, logprobs=1).choices[0]
    parts = [
        part.choices[0]
        for part in complete(server, prompt=LONG, max_tokens=max_tokens, echo=True, logprobs=1, stream=True)
    ]
    assert parts[0].text.startswith(LONG)
    assert "".join(part.text for part in parts) == whole.text
    assert parts[-1].finish_reason == whole.finish_reason == "length"
    reported = [part.logprobs for part in parts if part.logprobs is not None]
    assert [one for part in reported for one in part.tokens] == whole.logprobs.tokens
    assert [one for part in reported for one in part.text_offset] == whole.logprobs.text_offset


@dataclass(frozen=True)
class EndsAtOnce(RandomModel):
    """A model all of whose tokens end a text."""

    @property
    def ends(self) -> frozenset[int]:
        return frozenset(range(self.tokenizer.vocab_size))


def test_the_last_token_reported_is_the_new_one_even_if_it_ends_the_text(opened):
    """Clients that score a prompt ask for one new token, and leave out the last token of the answer."""
    with served(EndsAtOnce(**vars(opened))) as server:
        (choice,) = complete(server, max_tokens=1, echo=True, logprobs=1, temperature=0).choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "stop")
    assert len(choice.logprobs.token_logprobs) == len(PROMPT.encode()) + 1


def test_stop_strings_do_not_end_a_prompt(server):
    (choice,) = complete(server, max_tokens=3, echo=True, stop=["return"]).choices
    assert choice.text.startswith(PROMPT)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0 adds nothing; give 1 or more, or echo=true"),
        ({"max_tokens": 0, "echo": False}, "max_tokens", "max_tokens=0 adds nothing"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "Input should be greater than or equal to 0"),
        ({"echo": True, "extra_body": {"session": "s"}}, "echo", "leave out one of them"),
        ({"echo": "yes"}, "echo", "Input should be a valid boolean"),
    ],
)
def test_what_has_no_answer_is_refused(server, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, **fields)
    assert caught.value.param == param
    assert message in str(caught.value)


def test_a_prompt_may_fill_the_learned_positions_and_no_more():
    with served(random_model(attention=FLURKA, position="learned", max_positions=64)) as server:
        assert complete(server, prompt="x" * 64, max_tokens=0, echo=True).choices[0].text == "x" * 64
        with pytest.raises(openai.BadRequestError, match="exceeds the model's 64 learned positions"):
            complete(server, prompt="x" * 65, max_tokens=0, echo=True)


def test_chats_are_not_echoed():
    with served(chat_model()) as server, pytest.raises(openai.BadRequestError, match="echo is not supported"):
        server.client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "x"}], extra_body={"echo": True}
        )
