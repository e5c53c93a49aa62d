"""Checks of the prompts, before a model is loaded."""

import pytest


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
