"""Log-probabilities of served tokens."""

import pytest

from data_pipeline.tokenizers import ByteTokenizer
from tests.chats import PLAIN, conversation
from tests.serving import NAME, random_model, served
from tests.unit.generation.small_models import FLURKA


@pytest.fixture(scope="module")
def server():
    """A server of a model of random bytes, most of which are no whole character."""
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = PLAIN
    with served(random_model(tokenizer, attention=FLURKA)) as server:
        yield server


def decoded(tokens: list[str], prefix: str) -> bytes:
    """The bytes of tokens as the server writes them: their text, or their bytes in hexadecimal."""
    escape = prefix + "\\x"
    return b"".join(
        bytes.fromhex(token.removeprefix(prefix).replace("\\x", ""))
        if token.startswith(escape)
        else token.encode()
        for token in tokens
    )


def test_the_tokens_of_a_chat_have_their_own_bytes(server):
    choice = (
        server.client.chat.completions.create(
            model=NAME, messages=conversation("é"), max_tokens=200, seed=1, logprobs=True, top_logprobs=5
        )
    ).choices[0]
    tokens = choice.logprobs.content
    data = b"".join(bytes(token.bytes) for token in tokens)
    assert all(len(token.bytes) == 1 for token in tokens)
    assert data.decode(errors="replace") == choice.message.content
    assert "\ufffd" in choice.message.content
    assert decoded([token.token for token in tokens], "") == data
    for token in tokens:
        assert [entry.logprob for entry in token.top_logprobs] == sorted(
            (entry.logprob for entry in token.top_logprobs), reverse=True
        )
        assert len({bytes(entry.bytes) for entry in token.top_logprobs}) == 5


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_completions_log_probabilities_fit_its_text_and_have_the_chosen_token(server, is_streamed):
    request = {"model": NAME, "prompt": "é", "max_tokens": 200, "seed": 2, "logprobs": 2}
    answers = server.client.completions.create(**request, stream=is_streamed)
    choices = [answer.choices[0] for answer in (answers if is_streamed else [answers])]
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    logprobs = [value for part in parts for value in part.token_logprobs]
    best = [top for part in parts for top in part.top_logprobs]
    assert len(tokens) == len(offsets) == 200
    assert decoded(tokens, "bytes:").decode(errors="replace") == text
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text) - 1
    for token, offset in zip(tokens, offsets):
        if not token.startswith("bytes:") and text[offset] != "\ufffd":
            assert text[offset : offset + len(token)] == token
    for token, logprob, top in zip(tokens, logprobs, best):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
