"""Prompts, before a model is looked for."""

import pytest


@pytest.mark.parametrize(
    ("option", "content", "said"),
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
def test_what_is_no_prompt_is_one_line(tmp_path, option, content, said, refused):
    file = tmp_path / "prompts"
    if content is not None:
        file.write_bytes(content)
    line = refused("generate", "runs/x", option, file)
    assert f"{option} {file}" in line
    assert said in line


@pytest.mark.parametrize(
    "typed", [[], ["--prompt", "x", "--prompt-file", "y"], ["--prompts", "x", "--prompt", ""]]
)
def test_prompts_are_given_in_one_way(typed, refused):
    assert "--prompt" in refused("generate", "runs/x", *typed)
