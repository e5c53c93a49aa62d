import pytest

from data_pipeline.tokenizers import ByteTokenizer, train_bpe
from megakernel.generation.text import TextStream

TEXT = "naïve café: 漢字, 👍🏽 done"


@pytest.fixture(scope="module", params=["byte", "bpe"])
def tokenizer(request):
    # With 257 ids BPE has only bytes, so every character beyond ASCII takes several tokens.
    return ByteTokenizer() if request.param == "byte" else train_bpe([TEXT], 257)


def test_pieces_concatenate_to_the_text_without_splitting_characters(tokenizer):
    stream = TextStream(tokenizer, tokenizer.encode("Prompt é "))
    pieces = [stream.add(token) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert stream.end() == ""


def test_a_character_is_output_with_its_last_token(tokenizer):
    stream = TextStream(tokenizer, [])
    assert [stream.add(token) for token in tokenizer.encode("aé")] == ["a", "", "é"]


def test_an_incomplete_character_is_output_at_the_end():
    stream = TextStream(ByteTokenizer(), [])
    assert stream.add("é".encode()[0]) == ""
    assert stream.end() == "\ufffd"


def test_invalid_utf8_does_not_delay_the_following_text():
    stream = TextStream(ByteTokenizer(), [])
    assert [stream.add(token) for token in (0xFF, ord("a"), ord("b"))] == ["", "\ufffda", "b"]


def test_a_character_that_begins_in_the_prompt_is_output_when_it_is_complete(tokenizer):
    *first, last = tokenizer.encode("é")
    stream = TextStream(tokenizer, [*tokenizer.encode("caf"), *first])
    assert [stream.add(token) for token in (last, *tokenizer.encode("s"))] == ["é", "s"]
    stream = TextStream(tokenizer, first)
    assert [stream.add(token) for token in tokenizer.encode("ab")] == ["a", "b"]
