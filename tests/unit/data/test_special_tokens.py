"""`prepare --special-tokens parse`: names of special tokens in texts."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_pipeline import tokenizers
from data_pipeline.manifest import Manifest
from data_pipeline.prepare import PrepareRequest, prepare
from data_pipeline.token_files import TokenFile
from megakernel.config.errors import UserError
from tests.unit.data.conftest import write_jsonl

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
TEXTS = [
    f"{FIM[0]}def f(x):{FIM[1]}    return y{FIM[2]} y = x",
    "no token is named here",
    "<s>it begins and ends itself</s>",
    "an end </s> inside of it",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of a tokenizer with BOS and three further special tokens, and the tokenizer."""
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("tokenizer")
    fast = tokenizers.train_bpe(["def return of the words and more of the words"] * 9, 300)._tokenizer
    fast.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": FIM})
    fast._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fast.convert_tokens_to_ids("<s>"))]
    )
    fast.save_pretrained(folder)
    return folder, fast


def prepared(tokenizer: Path, tmp_path: Path, texts: list[str] = TEXTS, **options: Any) -> tuple[Path, str]:
    """The prepared folder, and what was printed."""
    source = write_jsonl(tmp_path / "texts.jsonl", texts)
    request = PrepareRequest(
        source=[str(source)], tokenizer=str(tokenizer), **{"validation_fraction": 0, **options}
    )
    console = Console(record=True, width=200, file=(tmp_path / "output").open("w"))
    prepare(request, tmp_path / "out", workers=1, overwrite=True, console=console)
    return tmp_path / "out", console.export_text()


def documents(folder: Path) -> list[list[int]]:
    tokens = TokenFile(folder / "train")
    return [tokens[index].tolist() for index in range(len(tokens))]


def test_names_are_read_as_the_tokens_and_bounds_are_not_doubled(tokenizer: Any, tmp_path: Path):
    folder, fast = tokenizer
    out, output = prepared(folder, tmp_path, special_tokens="parse")
    bos, eod = fast.bos_token_id, fast.eos_token_id
    expected = [fast(text.removeprefix("<s>").removesuffix("</s>"))["input_ids"] + [eod] for text in TEXTS]
    assert documents(out) == expected
    for number, ids in enumerate(expected):
        assert ids.count(bos) == 1
        assert ids.count(eod) == (2 if number == 3 else 1)
        assert sum(ids.count(fast.convert_tokens_to_ids(name)) for name in FIM) == (3 if number == 0 else 0)
    assert f"special tokens in texts: {FIM[0]} 1, {FIM[1]} 1, {FIM[2]} 1, </s> 1\n" in output
    assert Manifest.read(out).arguments["special_tokens"] == "parse"
    # The tokenizer of runs and exports stays as it was: prompts of users are text.
    saved = tokenizers.load(out / "tokenizer")
    assert (
        saved.encode(FIM[0]) == fast(FIM[0], add_special_tokens=False, split_special_tokens=True)["input_ids"]
    )
    assert len(saved.encode(FIM[0])) > 1


def test_by_default_they_are_text(tokenizer: Any, tmp_path: Path):
    folder, fast = tokenizer
    out, output = prepared(folder, tmp_path)
    special = {fast.convert_tokens_to_ids(name) for name in FIM}
    assert not special & {token for document in documents(out) for token in document}
    assert "special tokens" not in output


def test_a_corpus_without_any_says_none(tokenizer: Any, tmp_path: Path):
    _, output = prepared(tokenizer[0], tmp_path, TEXTS[1:2] * 3, special_tokens="parse")
    assert "special tokens in texts: none\n" in output


def test_both_splits_are_counted(tokenizer: Any, tmp_path: Path):
    _, output = prepared(
        tokenizer[0],
        tmp_path,
        [f"{i} {FIM[0]}" for i in range(50)],
        special_tokens="parse",
        validation_fraction=0.3,
    )
    assert f"special tokens in texts: {FIM[0]} 50\n" in output


@pytest.mark.parametrize("spec", ["byte", "pixels", "words", "bpe:300"])
def test_own_tokenizers_have_none(spec: str, tmp_path: Path):
    with pytest.raises(UserError, match=f"--special-tokens parse: --tokenizer {spec} has no special token"):
        prepared(Path(spec), tmp_path, special_tokens="parse")


def test_conversations_are_not_parsed(tokenizer: Any, tmp_path: Path):
    with pytest.raises(
        UserError, match="--special-tokens parse: the chat template writes those of conversations"
    ):
        prepared(tokenizer[0], tmp_path, special_tokens="parse", chat=True)


def test_a_folder_made_the_other_way_is_refused(tokenizer: Any, tmp_path: Path):
    prepared(tokenizer[0], tmp_path)
    request = PrepareRequest(
        source=[str(tmp_path / "texts.jsonl")],
        tokenizer=str(tokenizer[0]),
        validation_fraction=0,
        special_tokens="parse",
    )
    with pytest.raises(UserError, match="was prepared with special_tokens='text', not 'parse'"):
        prepare(request, tmp_path / "out", workers=1, overwrite=False, console=Console(quiet=True))
