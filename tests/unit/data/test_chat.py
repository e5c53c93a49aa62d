"""Conversations rendered by a tokenizer's chat template, and which of their tokens count in the loss."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from data_pipeline import chat_rendering, tokenizers
from data_pipeline.chat import ChatTemplate
from data_pipeline.corpus import Corpora
from data_pipeline.document import Columns
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.manifest import Manifest
from data_pipeline.order import Share
from data_pipeline.prepare import open_source
from data_pipeline.token_files import TokenFile, scored_prefix
from data_pipeline.tokenizers import ByteTokenizer
from launch.cli import main
from megakernel.config.errors import UserError
from megakernel.config.tree import Config
from tests.chats import (
    CHATML,
    FORGETFUL,
    MARKED,
    PLAIN,
    TURNS,
    conversation,
    save_tokenizer,
    tokenizer,
    write_chats,
)
from tests.unit.data.conftest import prepared

Configure = Callable[..., Config]

CHATS = [
    conversation(f"What is {number} plus 1?", f"It is {number + 1}.", "And é?", "漢字", system="Add.")
    for number in range(60)
]
TWO_TURNS = conversation("hi", "Hello é!", "more", "Bye", system="Be kind.")


def template(text: str, tmp_path: Path) -> ChatTemplate:
    return ChatTemplate(tokenizers.load(save_tokenizer(text, tmp_path / "tokenizer")))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of two turns, rendered by CHATML."""
    folder = tmp_path_factory.mktemp("chats")
    source = write_chats(folder / "chats.jsonl", CHATS)
    tokenizer_folder = str(save_tokenizer(CHATML, folder / "tokenizer"))
    prepared(folder / "prepared", [str(source)], tokenizer=tokenizer_folder, chat=True, text_key="messages")
    return folder / "prepared"


@pytest.mark.parametrize("text", [CHATML, MARKED])
def test_tokens_are_those_of_apply_chat_template_and_an_end_of_document(text: str, tmp_path: Path):
    found = template(text, tmp_path).encode(TWO_TURNS)
    expected = tokenizer(text).apply_chat_template(TWO_TURNS, return_dict=False)
    assert found.tokens == [*expected, 256]
    assert found.scored[-1] == 0, "the answer ends with its own token"


def test_a_template_with_generation_marks_counts_the_assistant_mask(tmp_path: Path):
    ascii_only = conversation("hi", "Hello!", "more", "Bye")
    found = template(MARKED, tmp_path).encode(ascii_only)
    expected = tokenizer(MARKED).apply_chat_template(
        ascii_only, return_dict=True, return_assistant_tokens_mask=True
    )
    assert found.scored.tolist() == [*expected["assistant_masks"], 0]


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (CHATML, "Hello é!<|im_end|>Bye<|im_end|>"),
        (MARKED, "Hello é!<|im_end|>Bye<|im_end|>"),
        (PLAIN, "Hello é!\nBye\n<|im_end|>"),
    ],
)
def test_only_answers_and_their_end_tokens_count(text: str, answers: str, tmp_path: Path):
    found = template(text, tmp_path).encode(TWO_TURNS)
    counted = np.array(found.tokens)[found.scored != 0].tolist()
    assert tokenizer(text).decode(counted) == answers


def test_no_second_end_of_document_follows_a_template_that_ends_with_it(tmp_path: Path):
    found = template(TURNS, tmp_path).encode(conversation("hi", "Hello!"))
    assert found.tokens[-2:] == [ord("!"), 256]
    assert found.scored[-1] == 1
    assert tokenizer(TURNS).decode(np.array(found.tokens)[found.scored != 0].tolist()) == " Hello!<|im_end|>"


def test_a_prompt_ends_with_the_generation_prompt(tmp_path: Path):
    found = template(CHATML, tmp_path).prompt(TWO_TURNS[:2])
    expected = tokenizer(CHATML).apply_chat_template(
        TWO_TURNS[:2], add_generation_prompt=True, return_dict=False
    )
    assert found == expected


def test_a_template_that_renders_earlier_answers_differently_is_refused(tmp_path: Path):
    forgetful = template(FORGETFUL, tmp_path)
    assert forgetful.encode(conversation("hi", "Hello!")).scored.any(), (
        "the last message is rendered only once"
    )
    with pytest.raises(
        UserError, match=r"renders message 2 of the conversation that begins with 'hi' differently"
    ):
        forgetful.encode(conversation("hi", "Hello!", "more", "Bye"))


def test_an_error_of_the_template_is_reported_with_its_reason(tmp_path: Path):
    with pytest.raises(UserError, match=r"rejects .* 'Be kind.': Only user and assistant roles are supp"):
        template(TURNS, tmp_path).encode(TWO_TURNS)


def test_a_prepared_folder_holds_the_conversations_the_mask_and_the_template(chats: Path):
    manifest = Manifest.read(chats)
    assert manifest.chat_template is not None
    for split, record in manifest.splits.items():
        tokens, scored = TokenFile(chats / split), TokenFile(scored_prefix(chats / split))
        assert record.documents == len(tokens) == len(scored)
        assert tokens.sequence_lengths.tolist() == scored.sequence_lengths.tolist()
        assert record.scored is not None
        assert record.scored.tokens == sum(int(flags.sum()) for flags in scored)
    assert sum(record.documents for record in manifest.splits.values()) == len(CHATS)
    assert AutoTokenizer.from_pretrained(chats / "tokenizer").chat_template == CHATML


def test_a_damaged_mask_is_refused(chats: Path, configure: Configure, tmp_path: Path):
    for file in chats.iterdir():
        (tmp_path / file.name).symlink_to(file)
    mask = tmp_path / "train.scored.bin"
    flags = bytearray(mask.read_bytes())
    mask.unlink()
    flags[10] ^= 1
    mask.write_bytes(flags)
    with pytest.raises(UserError, match=r"holds a damaged train\.scored\.bin"):
        Corpora(configure(tmp_path).data)


@pytest.mark.parametrize("size", [1, 4])
def test_assistant_labels_count_in_every_context_parallel_layout(
    size: int, chats: Path, configure: Configure
):
    config = configure(chats, seq_len=128)
    corpora = Corpora(config.data)
    assert not corpora.is_text("train")

    def batches(share: Share):
        return [
            *next(TrainingBatches(config, corpora, share).from_step(2)),
            *ValidationBatches(config, corpora, share),
        ]

    shards = [batches(Share(cp_rank=rank, cp_size=size)) for rank in range(size)]
    assistant_tokens = 0
    for index, whole in enumerate(batches(Share())):
        for name in ("tokens", "loss_mask", "positions"):
            parts = torch.cat([getattr(cp_shard[index], name) for cp_shard in shards], 1)
            assert torch.equal(parts, getattr(whole, name))
        counted = whole.labels[whole.loss_mask]
        assistant_tokens += len(counted)
        assert not (counted == 257).any(), "an answer contains no start of a message"
        assert 0.02 < float(whole.loss_mask.float().mean()) < 0.4
    assert assistant_tokens


def test_a_conversation_is_one_document_even_if_eod_ends_each_message(chats: Path, configure: Configure):
    config = configure(chats, seq_len=128)
    (batch, *_) = next(TrainingBatches(config, Corpora(config.data), Share()).from_step(0))
    starts = (batch.positions == 0) & (torch.arange(128) > 0)
    # A conversation begins with its system message; each of its five messages ends with the same token.
    assert starts.any()
    for row, place in starts.nonzero().tolist():
        assert bytes(batch.tokens[row, place + 1 : place + 7].tolist()) == b"system"[: 128 - place - 1]
    assert (batch.tokens == 256).sum() > 3 * starts.sum()


def test_the_byte_tokenizer_takes_a_template_from_a_file_and_saves_it(tmp_path: Path):
    source = write_chats(tmp_path / "chats.jsonl", CHATS, key="talk")
    (tmp_path / "plain.jinja").write_text(PLAIN)
    options = ["--source", source, "--text-key", "talk", "--tokenizer", "byte", "--out", tmp_path / "out"]
    command = [
        "prepare",
        "--chat",
        "--chat-template",
        tmp_path / "plain.jinja",
        "--validation-fraction",
        0,
        *options,
    ]
    assert main([str(part) for part in command]) == 0
    kept = tokenizers.load(tmp_path / "out" / "tokenizer")
    assert isinstance(kept, ByteTokenizer)
    assert kept.chat_template == PLAIN
    assert not kept.ends_messages
    (tmp_path / "plain.jinja").write_text(PLAIN + " ")
    assert main([str(part) for part in command]) == 2, "another template needs another folder"


def test_a_hub_dataset_gives_the_same_conversations(tmp_path: Path):
    (tmp_path / "dataset").mkdir()
    table = write_chats(tmp_path / "dataset" / "train.jsonl", CHATS[:5])
    columns = Columns(("messages",), chat=True)
    hub = open_source([f"hf:{tmp_path / 'dataset'}"], columns=columns)
    files = open_source([str(table)], columns=columns)
    assert [document.messages for document in hub] == [document.messages for document in files]
    assert hub.description["kind"] == "hub"


def test_conversations_without_an_answer_are_counted_as_skipped(tmp_path: Path):
    table = write_chats(tmp_path / "chats.jsonl", [*CHATS[:3], conversation("Anybody?"), []])
    source = open_source([str(table)], columns=Columns(("messages",), chat=True))
    assert [document.messages for document in source] == [tuple(chat) for chat in CHATS[:3]]
    assert source.skipped == {"no message of the assistant": 1, "empty": 1}


FINE = conversation("hi", "Hello!")


@pytest.mark.parametrize(
    ("chat", "options", "explanation"),
    [
        (
            [{"role": "robot", "content": "hi"}],
            [],
            r"role 'robot' is none of system, developer, user, assistant, tool",
        ),
        ([{"from": "human", "value": "hi"}], [], r"a message has the keys from, value and no role"),
        ([{"role": "user"}], [], r"a message of role user has no content"),
        ([{"role": "user", "content": 5}], [], r"a message's content is int, not text; write a string"),
        (FINE, ["--text-key", "talk"], r"no column 'talk' among messages; set --text-key"),
        (FINE, ["--tokenizer", "byte"], r"the tokenizer has no chat template; give one with"),
        (FINE, ["--add-bos"], r"--add-bos: the chat template says how conversations begin"),
        (FINE, ["--chat-template", "nowhere"], r"--chat-template nowhere cannot be read"),
        (FINE, ["--source", "stdlib"], r"--chat reads tables of conversations, and stdlib is not a table"),
    ],
)
def test_invalid_conversations_are_refused_in_one_line(
    chat, options: list[str], explanation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = write_chats(tmp_path / "chats.jsonl", [chat])
    tokenizer_folder = save_tokenizer(CHATML, tmp_path / "tokenizer")
    command = [
        "prepare",
        "--chat",
        "--source",
        source,
        "--tokenizer",
        tokenizer_folder,
        "--out",
        tmp_path / "out",
    ]
    assert main([*map(str, command), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert re.search(explanation, error), error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_chat_template_without_chat_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="needs conversations; add --chat"):
        prepared(tmp_path / "out", ["stdlib"], chat_template=tmp_path / "plain.jinja")


def test_corpora_of_two_templates_are_refused(chats: Path, configure: Configure, tmp_path: Path):
    other = shutil.copytree(chats, tmp_path / "other")
    Manifest.read(other).model_copy(update={"chat_template": "0" * 64}).write(other)
    with pytest.raises(
        UserError, match=r"prepared with another chat template than .*prepared; prepare it with"
    ):
        Corpora(configure([chats, other]).data)


def test_a_masked_language_model_on_conversations_is_refused(chats: Path, configure: Configure):
    config = configure(chats)
    masked = config.model_copy(update={"model": config.model.model_copy(update={"kind": "masked_lm"})})
    with pytest.raises(UserError, match=r"holds conversations, whose answers a causal_lm learns"):
        TrainingBatches(masked, Corpora(masked.data), Share())


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(text='x') %}{% for i in range(60) %}{% set n.text = n.text + n.text %}{% endfor %}"
    "{{ n.text }}"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOOP, "it takes more than 1 s of CPU time"),
        ("{{ 9 ** (9 ** 9) }}", "it takes more than 1 s of CPU time"),
        (DOUBLING, "it takes more than 1,073,741,824 bytes of memory"),
        ("{{ 'x' * 9999999999 }}", "it takes more than 1,073,741,824 bytes of memory"),
        ("{{ 'x' * 100000000 }}", "it becomes 100,000,000 characters"),
    ],
)
def test_a_template_without_bounds_is_stopped_and_the_next_one_is_rendered(
    text, reason, tmp_path, monkeypatch
):
    if "CPU" in reason:
        monkeypatch.setattr(chat_rendering, "CPU_SECONDS", 1)
    with pytest.raises(UserError, match=f"the chat template rejects .* 'hi': {reason}") as raised:
        template(text, tmp_path / "boundless").prompt(conversation("hi"))
    assert len(str(raised.value).splitlines()) == 1
    plain = template(PLAIN, tmp_path / "plain")
    assert plain.prompt(conversation("hi")) == plain._tokenizer.encode("user: hi\nassistant: ")
