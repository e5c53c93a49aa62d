"""`--source gettext:LANGUAGE`: the messages of installed catalogs and their translations."""

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.manifest import Manifest
from data_pipeline.prepare import PrepareRequest
from data_pipeline.source_names import open_source
from megakernel.config import UserError
from tests.unit.data.conftest import prepared
from tests.unit.data.test_pairs import pairs_of

HEADER = "Content-Type: text/plain; charset={}\nPlural-Forms: nplurals={}; plural={};\n"
GERMAN = {"File": "Datei", "Save as": "Speichern unter", "Quit": "Beenden"}


def compiled(
    entries: dict[str, str], charset: str = "utf-8", forms: int = 2, plural: str = "n != 1", order: str = "<"
) -> bytes:
    """The bytes of a .mo file, as GNU gettext's manual lays them out; a plural form ends with NUL."""
    texts = {"": HEADER.format(charset, forms, plural), **entries}
    pairs = sorted((key.encode(charset), text.encode(charset)) for key, text in texts.items())
    count, tables, strings = len(pairs), [b"", b""], b""
    start = 28 + 16 * count
    for side in (0, 1):
        for pair in pairs:
            tables[side] += struct.pack(f"{order}2I", len(pair[side]), start + len(strings))
            strings += pair[side] + b"\0"
    head = struct.pack(f"{order}7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    return head + b"".join(tables) + strings


def install(folder: Path, language: str = "de", **catalogs: dict[str, str] | bytes) -> str:
    """Write catalogs, by name, and return the source of them."""
    messages = folder / language / "LC_MESSAGES"
    messages.mkdir(parents=True, exist_ok=True)
    for name, content in catalogs.items():
        (messages / f"{name}.mo").write_bytes(content if isinstance(content, bytes) else compiled(content))
    return f"gettext:{language}:{folder}"


def read(source: str) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """The pairs of a source, and what it skips."""
    opened = open_source([source])
    return [document.texts for document in opened], dict(opened.skipped)


def test_messages_and_their_translations_become_pairs(tmp_path: Path):
    source = install(tmp_path / "locale", editor=GERMAN, shell={"Exit": "Verlassen"})
    manifest = prepared(tmp_path / "out", [source])
    assert manifest.pairs
    found = [pair for split in manifest.splits for pair in pairs_of(tmp_path / "out", split)]
    assert sorted(found) == sorted([*GERMAN.items(), ("Exit", "Verlassen")])
    assert manifest.source == {
        "kind": "gettext",
        "language": "de",
        "folder": str(tmp_path / "locale"),
        "files": 2,
    }
    assert manifest.skipped == {}


def test_the_order_is_that_of_names_and_messages(tmp_path: Path):
    source = install(tmp_path, shell={"b": "B", "a": "A"}, editor={"d": "D", "c": "C"})
    assert read(source)[0] == [("c", "C"), ("d", "D"), ("a", "A"), ("b", "B")]


def test_a_message_has_no_context(tmp_path: Path):
    source = install(tmp_path, editor={"menu\x04Open": "Öffnen", "state\x04Open": "Offen"})
    assert read(source)[0] == [("Open", "Öffnen"), ("Open", "Offen")]


@pytest.mark.parametrize(
    ("forms", "plural", "translations", "singular"),
    [
        (2, "n != 1", ["eine Datei", "%d Dateien"], "eine Datei"),
        (1, "0", ["%d Dateien"], "%d Dateien"),
        (3, "n==1 ? 2 : n==0 ? 0 : 1", ["keine Datei", "%d Dateien", "eine Datei"], "eine Datei"),
    ],
)
def test_of_plural_forms_the_singular_is_read(
    forms: int, plural: str, translations: list[str], singular: str, tmp_path: Path
):
    entries = {
        "one file\0%d files": "\0".join(translations),
        "list\x04one row\0%d rows": "\0".join(translations),
    }
    source = install(tmp_path, editor=compiled(entries, forms=forms, plural=plural))
    assert read(source) == ([("one row", singular), ("one file", singular)], {})


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("charset", ["iso-8859-1", "utf-8"])
def test_catalogs_of_other_charsets_and_byte_orders_are_read(charset: str, order: str, tmp_path: Path):
    source = install(tmp_path, editor=compiled({"Colour": "Färbung"}, charset, order=order))
    assert read(source) == ([("Colour", "Färbung")], {})


def test_messages_that_translate_nothing_are_skipped_and_counted(tmp_path: Path):
    entries = {"OK": "OK", "UTF-8": "UTF-8", "Help": "", " ": "Leer", "File": "Datei"}
    assert read(install(tmp_path, editor=entries)) == (
        [("File", "Datei")],
        {"equal to its source": 2, "one side is empty": 2},
    )


def test_a_pair_of_several_catalogs_is_read_once(tmp_path: Path):
    source = install(tmp_path, editor=GERMAN, shell={"File": "Datei", "Quit": "Verlassen"})
    assert read(source) == ([*sorted(GERMAN.items()), ("Quit", "Verlassen")], {"read before": 1})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: content[:30], "unpack"),
        (lambda content: content[:-20], "File is corrupt"),
        (lambda content: b"text" + content[4:], "Bad magic number"),
        (lambda content: content.replace(b"utf-8", b"none!"), "unknown encoding: none!"),
        (
            lambda content: content.replace("Färbung".encode(), b"F\xe4\xe4rbung"),
            "'utf-8' codec can't decode",
        ),
        (lambda content: content.replace(b"n != 1", b"import"), "in plural form"),
        (lambda content: content.replace(b"n != 1", b"1%0==n"), "division|modulo"),
        (lambda content: b"", "unpack"),
    ],
)
def test_a_damaged_catalog_is_left_out_by_name(
    damage: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    from launch.cli import main

    content = compiled({"Colour": "Färbung", "one\0more": "eins\0mehr"})
    assert damage(content) != content
    source = install(tmp_path / "locale", broken=damage(content), editor=GERMAN)
    words = ["--source", source, "--tokenizer", "byte", "--validation-fraction", "0"]
    assert main(["prepare", *words, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "  1 file read as messages (message catalog): editor.mo" in lines
    [line] = [line for line in lines if "left out" in line]
    assert line.startswith("  1 file left out: damaged (")
    assert line.endswith("): broken.mo")
    manifest = Manifest.read(tmp_path / "out")
    [(reason, count)] = manifest.source["left_out"].items()
    assert re.search(why, reason), reason
    assert count == 1
    assert pairs_of(tmp_path / "out", "train") == sorted(GERMAN.items())


def test_a_message_that_is_not_unicode_is_skipped(tmp_path: Path):
    content = compiled({"File": "+2AA-"}, "ascii").replace(b"charset=ascii", b"charset=utf-7")
    assert read(install(tmp_path, editor=content)) == ([], {"not UTF-8": 1})


def test_all_catalogs_damaged_is_an_error(tmp_path: Path):
    source = install(tmp_path / "locale", editor=b"nothing")
    with pytest.raises(UserError, match=r"--source gettext:de:.* holds no text"):
        prepared(tmp_path / "out", [source], validation_fraction=0.0)


@pytest.mark.parametrize(
    ("language", "problem"),
    [
        ("dee", "dee/LC_MESSAGES has no .mo file; choose de, fr, or install packages that bring some"),
        ("", "names no language; write gettext:LANGUAGE, such as gettext:de, or"),
        ("..", "names no language"),
        ("/usr/share/locale", "names no language"),
    ],
)
def test_a_language_without_catalogs_is_refused(language: str, problem: str, tmp_path: Path, refused):
    for installed in ("de", "fr"):
        install(tmp_path / "locale", installed, editor=GERMAN)
    (tmp_path / "locale" / "it" / "LC_MESSAGES").mkdir(parents=True)
    source = f"gettext:{language}:{tmp_path / 'locale'}"
    line = refused("prepare", "--source", source, "--tokenizer", "byte", "--out", tmp_path / "out")
    assert f"--source {source}" in line
    assert problem in line


def test_a_folder_without_catalogs_is_refused(tmp_path: Path, refused):
    words = "--tokenizer", "byte", "--out", tmp_path / "out"
    line = refused("prepare", "--source", f"gettext:de:{tmp_path / 'none'}", *words)
    assert f"{tmp_path / 'none'} does not exist; give the folder that has de/LC_MESSAGES" in line
    line = refused("prepare", "--source", f"gettext:de:{tmp_path}", *words)
    assert (
        "de/LC_MESSAGES has no .mo file; install packages that bring some (Debian: apt-get install " in line
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--labels kind", "--labels kind is a column of tables, and gettext:de is not a table; leave it out"),
        (
            "--text-key en",
            "--text-key en is a column of tables, and --source gettext:de has none; leave it out",
        ),
        (
            "--second-text-key de",
            "--second-text-key de is a column of tables, and --source gettext:de has none",
        ),
        ("--chat", "--chat reads tables of conversations, and gettext:de is not a table"),
        ("--split test", "--split test is of a hub dataset, and --source gettext:de is not hf:NAME"),
        ("--include *.mo", "--include *.mo chooses files of directories, and --source gettext:de names none"),
        (
            "--part 0/2",
            "--part 0/2 chooses files, and --source gettext:de reads all catalogs, so that each pair is",
        ),
    ],
)
def test_options_of_tables_and_folders_are_refused(options: str, problem: str, tmp_path: Path, refused):
    words = "--source", "gettext:de", "--tokenizer", "byte", "--out", tmp_path / "out"
    assert problem in refused("prepare", *words, *options.split())


def test_the_folder_of_catalogs_does_not_depend_on_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    def recorded(source: str) -> list[str]:
        return PrepareRequest(source=[source], tokenizer="byte").arguments()["source"]

    assert recorded("gettext:de:my/locale") == [f"gettext:de:{tmp_path}/my/locale"]
    for absolute in ("gettext:de", "gettext:de:", "gettext:de:/usr/share/locale"):
        assert recorded(absolute) == [absolute]
