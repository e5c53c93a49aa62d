"""Batches of a run whose mixture of corpora changes, and whose lengths read on behind each other's text."""

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches
from data_pipeline.order import Share
from megakernel.config.errors import UserError
from megakernel.config.tree import Config
from tests.unit.data.conftest import prepared, write_jsonl
from tests.unit.data.test_loader import global_batch, open_batches, rows

Configure = Callable[..., Config]

NUMBERED = 300
"""Documents of the numbered corpora, of 16 tokens each."""


def numbered(folder: Path, mark: str) -> Path:
    """A corpus of documents `<mark 12>xxxx…`, whose numbers say what was read."""
    texts = [f"<{mark}{i:03d}>".ljust(15, "x") for i in range(NUMBERED)]
    prepared(folder / mark, [str(write_jsonl(folder / f"{mark}.jsonl", texts))], validation_fraction=0)
    return folder / mark


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    """The numbered corpora a and b, and one with a validation split."""
    folder = tmp_path_factory.mktemp("numbered")
    return {**{mark: numbered(folder, mark) for mark in "ab"}, "validation": corpus}


def sequences(config: Config) -> list[list[tuple[int, ...]]]:
    """The sequences of every step."""
    return [rows(batches) for batches in open_batches(config).from_step(0)]


def marks(steps: list[list[tuple[int, ...]]]) -> Counter[str]:
    """The marks of the documents that begin, and whose mark ends, in a sequence of these steps."""
    found: Counter[str] = Counter()
    for row in chain.from_iterable(steps):
        text = bytes(token if token < 256 else 0x20 for token in row[:-1]).decode()
        found.update(part[:4] for part in text.split("<")[1:] if part[4:5] == ">")
    return found


def staged(
    configure: Configure, folders: dict[str, Path], stages: list[dict[str, Any]], **keys: Any
) -> Config:
    """8 sequences of 32 tokens in a step, of corpus a, then of the stages."""
    data = {"stages": stages, "validation": folders["validation"], **keys.pop("data", {})}
    return configure(folders["a"], data=data, **keys)


def both(folders: dict[str, Path]) -> dict[str, float]:
    """The numbered corpora in equal shares."""
    return {str(folders[mark]): 1 for mark in "ba"}


def test_a_stage_reads_its_corpora_by_their_weights(configure: Configure, folders: dict[str, Path]):
    mixture = {str(folders["a"]): 1, str(folders["b"]): 3}
    config = staged(configure, folders, [{"from_step": 4, "train": mixture}])
    steps = sequences(config)
    assert {mark[0] for mark in marks(steps[:4])} == {"a"}
    for step in steps[4:]:
        assert len([row for row in step if ord("a") in row]) == 2


def test_a_stage_may_begin_behind_a_number_of_tokens(configure: Configure, folders: dict[str, Path]):
    by_step = staged(configure, folders, [{"from_step": 4, "train": folders["b"]}])
    for tokens in (3 * 256 + 1, 4 * 256):
        by_tokens = staged(configure, folders, [{"from_tokens": tokens, "train": folders["b"]}])
        assert sequences(by_tokens) == sequences(by_step)


@pytest.mark.parametrize("named", ["path", "link", "relative"])
def test_a_corpus_of_several_mixtures_is_not_read_again_before_all_of_it_was(
    named: str, configure: Configure, folders: dict[str, Path], tmp_path: Path
):
    again = folders["a"]
    if named == "link":
        again = tmp_path / "link"
        again.symlink_to(folders["a"])
    elif named == "relative":
        again = Path(os.path.relpath(folders["a"]))
    stages = [{"from_step": 5, "train": {str(folders["b"]): 1, str(again): 1}}]
    config = staged(configure, folders, stages, steps=20)
    assert set(marks(sequences(config)[:15]).values()) == {1}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_restart_in_any_stage_continues_it(workers: int, configure: Configure, folders: dict[str, Path]):
    stages = [{"from_step": 2, "train": both(folders)}]
    stages.append({"from_step": 5, "train": folders["b"]})
    schedule = [{"until_step": 4, "seq_len": 16}]
    config = staged(configure, folders, stages, data={"num_workers": workers}, seq_len_schedule=schedule)
    whole = sequences(config)
    assert len(whole) == 10
    for start in range(1, 10):
        assert [rows(batches) for batches in open_batches(config).from_step(start)] == whole[start:]
    assert global_batch(config, 3, data_size=2) == whole[3]


def test_longer_sequences_begin_with_text_that_shorter_ones_have_not_read(
    configure: Configure, folders: dict[str, Path]
):
    schedule = [{"until_step": 6, "seq_len": 16}, {"until_step": 12, "seq_len": 32}]
    keys = {
        "seq_len": 64,
        "global_batch_size": 8,
        "steps": 18,
        "seq_len_schedule": schedule,
        "eval_samples": 0,
    }
    # 4,800 tokens: 768 in sequences of 16, 1,536 of 32, then 2,496 are left for 4 steps of 64.
    config = staged(configure, folders, [], **keys)
    steps = sequences(config)
    read = marks(steps[:16])
    assert set(read.values()) == {1}
    assert len(read) > 0.7 * NUMBERED  # marks that two sequences share are not counted
    again = staged(configure, folders, [], data={"unread_first": False}, **keys)
    assert max(marks(sequences(again)[:16]).values()) > 1
    # Short sequences are drawn from all documents alike: their order was drawn before.
    numbers = sorted(int(mark[1:]) for mark in marks(steps[:6]))
    assert numbers[0] < 40 < 260 < numbers[-1]


def test_skipped_samples_of_one_stage_leave_the_later_ones_as_they_were(
    configure: Configure, folders: dict[str, Path]
):
    stages = [{"from_step": 4, "train": both(folders)}]
    schedule = [{"until_step": 7, "seq_len": 32}]
    keys = {"seq_len": 64, "seq_len_schedule": schedule}
    config = staged(configure, folders, stages, **keys)
    skipping = staged(configure, folders, stages, skip_samples=[(8, 11)], **keys)
    steps, others = sequences(config), sequences(skipping)
    assert [one == other for one, other in zip(steps, others)] == [True, False, False, False, *[True] * 6]


def test_the_use_of_each_corpus_sums_its_stages_and_names_the_first_key(
    configure: Configure, folders: dict[str, Path]
):
    stages = [{"from_step": 5, "train": both(folders)}]
    use = open_batches(staged(configure, folders, stages)).use()
    assert [(one.key, one.corpus) for one in use] == [
        ("data.train", str(folders["a"])),
        ("data.stages.0.train", str(folders["b"])),
    ]
    assert [one.share for one in use] == [0.75, 0.25]
    assert [one.passes for one in use] == pytest.approx([60 / 149, 20 / 149])


def test_phases_that_share_a_stream_are_counted_once(configure: Configure, folders: dict[str, Path]):
    schedule = [{"until_step": 4, "seq_len": 32, "global_batch_size": 4, "micro_batch_size": 4}]
    config = staged(configure, folders, [], seq_len_schedule=schedule, steps=6)
    (use,) = open_batches(config).use()
    assert use.passes == pytest.approx((4 * 4 + 2 * 8) / 149)


def test_a_stage_beyond_the_end_is_checked_and_not_opened(
    configure: Configure, folders: dict[str, Path], tmp_path: Path
):
    far = staged(configure, folders, [{"from_step": 50, "train": folders["b"]}])
    assert sequences(far) == sequences(staged(configure, folders, []))
    missing = staged(configure, folders, [{"from_step": 50, "train": tmp_path / "nowhere"}])
    with pytest.raises(UserError, match=r"^data\.stages\.0\.train=.*nowhere"):
        Corpora(missing.data, validation=False)


def test_a_stage_of_another_tokenizer_is_refused_by_its_key(
    configure: Configure, folders: dict[str, Path], tmp_path: Path
):
    source = write_jsonl(tmp_path / "other.jsonl", ["some words and more words"] * 50)
    prepared(tmp_path / "other", [str(source)], tokenizer="bpe:300", validation_fraction=0)
    config = staged(configure, folders, [{"from_step": 5, "train": tmp_path / "other"}])
    with pytest.raises(UserError, match=r"^data\.stages\.0\.train=.* was prepared with another tokenizer"):
        Corpora(config.data, validation=False)


def test_a_stage_with_too_little_text_is_refused_by_its_keys(configure: Configure, folders: dict[str, Path]):
    stages = [{"from_step": 5, "train": folders["b"]}]
    schedule = [{"until_step": 6, "seq_len": 16}]
    config = staged(configure, folders, stages, seq_len=10**5, seq_len_schedule=schedule)
    with pytest.raises(UserError, match=r"^data\.stages\.0\.train=.* takes training\.seq_len \+ 1 = 100001"):
        TrainingBatches(config, Corpora(config.data, validation=False), Share())


def test_bytes_per_token_are_those_of_the_stage(configure: Configure, folders: dict[str, Path], corpus: Path):
    config = staged(configure, folders, [{"from_step": 5, "train": corpus}])
    corpora = Corpora(config.data, validation=False)
    record = corpora.stages[1][0].record("train")
    assert corpora.bytes_per_token("train", 1) == record.bytes / record.tokens
    assert corpora.bytes_per_token("train") == 15 / 16


def test_the_tokenizer_is_that_of_a_stage_of_conversations(
    configure: Configure, folders: dict[str, Path], tmp_path: Path
):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    source, template = tmp_path / "chat.jsonl", tmp_path / "template.jinja"
    source.write_text((json.dumps({"messages": turns}) + "\n") * 80)
    template.write_text("{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}")
    options = {"chat": True, "text_key": "messages", "chat_template": template, "validation_fraction": 0}
    prepared(tmp_path / "chat", [str(source)], **options)
    config = staged(configure, folders, [{"from_step": 5, "train": tmp_path / "chat"}])
    corpora = Corpora(config.data, validation=False)
    assert corpora.tokenizer_folder == tmp_path / "chat/tokenizer"
