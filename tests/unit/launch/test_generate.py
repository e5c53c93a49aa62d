"""Checks of the prompts, before a model is loaded."""

import json
from types import SimpleNamespace

import pytest

from launch.cli import main
from megakernel.generation import TranslatedText


@pytest.mark.parametrize(
    ("option", "content", "error"),
    [
        ("--prompt-file", None, "cannot be read ("),
        ("--prompt-file", b"caf\xe9", "is not UTF-8 ('utf-8' codec can't decode byte 0xe9 in position 3"),
        ("--prompts", b"\xff", "is not UTF-8 ("),
        ("--prompts", b"\n\n", 'holds no line; write {"prompt": "..."}'),
        ("--prompts", b'{"prompt": "a"}\n\n{"prompt": 3}', 'line 3 has no prompt; write {"prompt": "..."}'),
        ("--prompts", b'{"text": "a"}', "line 1 has no prompt; write"),
        ("--prompts", b"def main", "line 1 has no prompt; write"),
        ("--prompts", b"[" * 100_000, "line 1 has no prompt; write"),
    ],
)
def test_an_invalid_prompt_file_is_refused_in_one_line(tmp_path, option, content, error, refused):
    file = tmp_path / "prompts"
    if content is not None:
        file.write_bytes(content)
    line = refused("generate", "runs/x", option, file)
    assert f"{option} {file}" in line
    assert error in line


@pytest.mark.parametrize(
    "options", [[], ["--prompt", "x", "--prompt-file", "y"], ["--prompts", "x", "--prompt", ""]]
)
def test_exactly_one_prompt_option_is_required(options, refused):
    assert "--prompt" in refused("generate", "runs/x", *options)


@pytest.fixture
def translations(monkeypatch, tmp_path):
    """The folder of a translator that never ends a text with `!`, and the list of the texts that it was given."""
    given = []

    def translate_texts(folder, prompts, **options):
        given.extend(prompts)
        return (
            TranslatedText(number, 0, text.upper(), True, not text.endswith("!"), len(text) + 1)
            for number, text in enumerate(prompts)
        )

    config = SimpleNamespace(model=SimpleNamespace(encoder=object()), training=SimpleNamespace(seq_len=8))
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("megakernel.generation.translate_texts", translate_texts)
    monkeypatch.setattr("megakernel.checkpoint.trained_run.recorded_config", lambda folder: config)
    monkeypatch.setattr("megakernel.checkpoint.trained_run.student_run", lambda folder: folder)
    return str(tmp_path), given


UNENDED = "without an end within --max-new-tokens: "
LONG = "longer than sources in training (training.seq_len=8): "


def test_translations_to_distrust_are_named_on_stderr(translations, capsys):
    folder, _ = translations
    assert (
        main(["generate", folder, "--prompt", "seven 7", "--prompt", "one!", "--prompt", "longer than"]) == 0
    )
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"{UNENDED}prompt 2", f"{LONG}prompt 3"]
    assert printed.out.splitlines()[1::2] == ["SEVEN 7", "ONE!", "LONGER THAN"]
    assert main(["generate", folder, "--prompt", "seven 7"]) == 0
    assert capsys.readouterr() == ("SEVEN 7\n", "")


def test_lines_of_translated_prompts_say_which_to_distrust(translations, tmp_path, capsys):
    folder, _ = translations
    lines = [{"prompt": "a"}] + [{"prompt": "very long!", "id": number} for number in range(7)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["generate", folder, "--prompts", str(tmp_path / "prompts.jsonl")]) == 0
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert found[0] == {"prompt": "a", "continuation": "A", "is_complete": True, "is_long": False}
    assert found[7] == {**lines[7], "continuation": "VERY LONG!", "is_complete": False, "is_long": True}
    named = "prompt 2, prompt 3, prompt 4, prompt 5, prompt 6 and 2 more"
    assert printed.err.splitlines() == [UNENDED + named, LONG + named]


@pytest.mark.parametrize(
    ("content", "source"), [("a b\n", "a b"), ("a\n\n", "a\n"), ("a\r\n", "a"), ("a", "a"), ("a\r", "a\r")]
)
def test_the_newline_that_ends_a_file_is_not_translated(content, source, translations, tmp_path):
    folder, given = translations
    (tmp_path / "text").write_bytes(content.encode())
    assert main(["generate", folder, "--prompt-file", str(tmp_path / "text")]) == 0
    assert given == [source]


def test_the_help_says_that_the_batch_of_a_translator_counts_hypotheses(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "of an encoder-decoder its hypotheses" in " ".join(capsys.readouterr().out.split())
