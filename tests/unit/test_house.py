"""The rules of living in this house that a machine can hold."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("megakernel", "launch", "data_pipeline")
SOURCES = sorted(path.relative_to(REPOSITORY) for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))
LONGEST = 400


def test_imports_go_one_way():
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_is_named_after_what_it_does():
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [path for path in SOURCES if vague & {path.stem, *path.parent.parts}] == []


def test_every_file_can_be_read_in_one_sitting():
    lengths = {path: len((REPOSITORY / path).read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}


def test_every_folder_of_sources_is_a_package():
    folders = {path.parent for path in SOURCES}
    assert [folder for folder in folders if not (REPOSITORY / folder / "__init__.py").exists()] == []


def test_nobody_is_sent_to_the_public_index_for_this_package():
    pages = [*SOURCES, "README.md", *(REPOSITORY / "docs").glob("*.md")]
    sends = re.compile(r"pip install '?megakernel\b")
    assert [path for path in pages if sends.search((REPOSITORY / path).read_text())] == []


@pytest.mark.parametrize("module", ["megakernel.config", "launch.cli"])
def test_what_answers_at_once_imports_no_heavy_library(module):
    heavy = ("torch", "megatron", "deepspeed", "datasets", "transformers", "tokenizers", "pyarrow", "triton")
    code = f"import sys, {module}; print(sorted(sys.modules.keys() & set({heavy})))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
