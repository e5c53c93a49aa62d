import pytest

from data_pipeline.tokenizers import ByteTokenizer, train_bpe
from megakernel.generation.text import TextStream

TEXT = "naïve café: 漢字, 👍🏽 done"


@pytest.fixture(scope="module", params=["byte", "bpe"])
def tokenizer(request):
    # 257 ids are the bytes alone, so that every character beyond ASCII takes several tokens.
    return ByteTokenizer() if request.param == "byte" else train_bpe([TEXT], 257)


def test_pieces_join_to_the_text_and_none_is_a_part_of_a_character(tokenizer):
    stream = TextStream(tokenizer, tokenizer.encode("Prompt é "))
    pieces = [stream.add(token) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert stream.end() == ""


def test_text_comes_with_the_token_that_completes_it(tokenizer):
    stream = TextStream(tokenizer, [])
    assert [stream.add(token) for token in tokenizer.encode("aé")] == ["a", "", "é"]


def test_what_never_becomes_a_character_is_shown_at_the_end():
    stream = TextStream(ByteTokenizer(), [])
    assert stream.add("é".encode()[0]) == ""
    assert stream.end() == "\ufffd"


def test_bytes_that_are_no_utf8_do_not_hold_up_what_follows():
    stream = TextStream(ByteTokenizer(), [])
    assert [stream.add(token) for token in (0xFF, ord("a"), ord("b"))] == ["", "\ufffda", "b"]
