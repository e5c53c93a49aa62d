"""A row that cannot be read is skipped, counted and named; the others are read."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from data_pipeline.document import TEXT, Columns
from data_pipeline.prepare import PrepareRequest, open_source, prepare
from launch.cli import main
from tests.chats import CHATML, save_tokenizer
from tests.unit.data.conftest import write_jsonl
from tests.unit.data.test_files import csv_text, prepared_output


def rows(*lines: str) -> str:
    """Good rows `0` to `9` as JSON lines, then these lines."""
    good = (json.dumps({"text": str(number)}) for number in range(10))
    return "".join(f"{line}\n" for line in (*good, *lines))


def read(file: Path, columns: Columns = TEXT) -> tuple[list[str], dict[str, int], list[tuple[int, str]]]:
    """The texts, what was skipped, and the bad rows' numbers and reasons."""
    source = open_source([str(file)], columns=columns)
    texts = [text for document in source for text in document.texts]
    named = [row for bad in source.counts.bad.values() for row in bad.first]
    return texts, dict(source.skipped), named


GOOD = [str(number) for number in range(10)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": 5}', "column 'text' holds int, not text; set --text-key"),
        ('{"text": ["a"]}', "column 'text' holds list, not text; set --text-key"),
        ('{"text": "cut of', "no JSON from character 17 on: Invalid control character"),
        ("", None),
        ('["b"]', "holds a list, not one row in braces"),
        ('{"text": "\\ud83d"}', "not UTF-8"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"text": ' + "1" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_a_bad_row_of_json_lines_is_skipped_and_named(tmp_path: Path, line: str, reason: str | None):
    for name in ("a.jsonl", "a.json", "a.txt"):
        (tmp_path / name).write_text(rows(line, '{"text": "last"}'))
        texts, skipped, bad = read(tmp_path / name)
        assert texts == [*GOOD, "last"]
        if reason is None:
            assert (skipped, bad) == ({}, [])
        else:
            assert sum(skipped.values()) == 1
            [(number, why)] = bad
            assert number == 11
            assert why.startswith(reason)


def test_the_first_row_may_be_the_bad_one(tmp_path: Path):
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text('{"text": "cut of\n' + rows())
        assert read(tmp_path / name)[0] == GOOD


def test_bytes_that_are_not_utf8_are_one_bad_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(rows().encode() + b'{"text": "\xff"}\n{"text": "last"}\n')
    assert read(tmp_path / "a.jsonl") == ([*GOOD, "last"], {"not UTF-8": 1}, [(11, "not UTF-8")])
    (tmp_path / "a.csv").write_bytes(b"text,id\n" + b"good,1\n" * 3 + b"\xff,2\nlast,3\n")
    assert read(tmp_path / "a.csv") == (["good"] * 3 + ["last"], {"not UTF-8": 1}, [(5, "not UTF-8")])


def test_an_array_that_is_cut_gives_the_rows_before(tmp_path: Path):
    array = json.dumps([{"text": text} for text in GOOD])
    (tmp_path / "a.json").write_text(array[:-5])
    texts, _, [(number, reason)] = read(tmp_path / "a.json")
    assert texts == GOOD[:-1]
    assert number == 10
    assert reason.endswith("and what follows cannot be read")
    (tmp_path / "a.json").write_text(array.replace('{"text": "4"}', '{"text": 4}'))
    assert read(tmp_path / "a.json")[0] == GOOD[:4] + GOOD[5:]


def test_a_row_of_csv_with_another_number_of_fields_is_named_by_its_line(tmp_path: Path):
    (tmp_path / "a.csv").write_text('id,text\n1,"a\nb"\n2\n3,c,d\n4,last\n')
    texts, _, bad = read(tmp_path / "a.csv")
    assert texts == ["a\nb", "last"]
    assert bad == [(4, "has 1 fields where the header has 2"), (5, "has 3 fields where the header has 2")]


def write_invalid_string(file: Path) -> None:
    """Three rows, of which the second is not UTF-8."""
    values = [b"one", b"t\xffo", b"three"]
    text = pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": text, "id": [1, 2, 3]}), file)


def test_an_invalid_string_in_parquet_is_one_bad_row(tmp_path: Path):
    write_invalid_string(tmp_path / "a.parquet")
    expected = ["one", "three"], {"not UTF-8": 1}, [(2, "not UTF-8")]
    assert read(tmp_path / "a.parquet") == expected
    pyarrow.feather.write_feather(
        pyarrow.parquet.read_table(tmp_path / "a.parquet"), str(tmp_path / "a.arrow")
    )
    assert read(tmp_path / "a.arrow") == expected


def test_a_damaged_group_of_rows_does_not_end_the_reading(tmp_path: Path):
    table = pyarrow.table({"text": [f"{number} " + "x" * 500 for number in range(3000)]})
    pyarrow.parquet.write_table(
        table, tmp_path / "a.parquet", row_group_size=1000, compression="gzip", use_dictionary=False
    )
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    chunk = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    whole[middle : middle + 100] = bytes(100)
    (tmp_path / "a.parquet").write_bytes(whole)
    texts, _, [(_, reason)] = read(tmp_path / "a.parquet")
    assert {text.split()[0] for text in texts} >= {
        str(number) for number in (*range(1000), *range(2000, 3000))
    }
    assert reason.startswith("rows 1,001 to 2,000 are damaged")


@pytest.mark.parametrize("damage", ["cut gzip", "cut zstd", "no footer", "no Parquet"])
def test_one_damaged_shard_does_not_end_the_reading(tmp_path: Path, damage: str):
    for name in ("0.jsonl", "2.jsonl"):
        (tmp_path / name).write_text(rows())
    shard = tmp_path / f"1.{'jsonl.gz' if 'cut' in damage else 'parquet'}"
    content = "".join(rows() for _ in range(3000)).encode()
    if damage == "cut gzip":
        shard.write_bytes(gzip.compress(content)[:-400])
    elif damage == "cut zstd":
        with pyarrow.output_stream(shard, compression="zstd") as stream:
            stream.write(content)
        shard.write_bytes(shard.read_bytes()[:-400])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": GOOD}), shard)
        shard.write_bytes(b"not a table" if damage == "no Parquet" else shard.read_bytes()[:-20])
    output = prepared_output(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")
    assert f"{shard}: row " in output
    assert "the file is damaged from here on" in output or "row 1 (" in output
    texts, skipped, bad = read(tmp_path)
    assert texts[:10] == texts[-10:] == GOOD
    assert (sum(skipped.values()), len(bad)) == (1, 1)


def test_a_table_of_bad_rows_alone_is_refused_with_the_first(tmp_path: Path):
    file = write_jsonl(tmp_path / "a.jsonl", ["a", "b", "c"])
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl cannot be read: row 1: column 'id' holds int, not text; set --text-key; 3 of 3",
    ):
        read(file, Columns(("id",)))


@pytest.mark.parametrize(
    ("good", "bad", "share", "passes"),
    [
        (1, 1, None, True),
        (1, 2, None, False),
        (10, 10, None, True),
        (1000, 11, None, False),
        (10_989, 11, None, True),
        (10_988, 12, None, False),
        (9, 1, 0.1, True),
        (8, 1, 0.1, False),
        (10_000, 1, 0, False),
        (1, 1, 1, True),
    ],
)
def test_more_bad_rows_than_the_share_allows_are_refused(
    tmp_path: Path, good: int, bad: int, share: float | None, passes: bool
):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * good + '{"text": 5}\n' * bad)
    source = open_source([str(tmp_path / "a.jsonl")])
    source.max_bad_rows = share
    if passes:
        assert len(list(source)) == good
        assert source.skipped == {"bad row": bad}
    else:
        limit = 0.001 if share is None else share
        with pytest.raises(
            ValueError, match=rf"{bad} of .* rows are bad, more than --max-bad-rows {limit:g} allows"
        ):
            list(source)


def test_max_bad_rows_stops_prepare_which_a_higher_limit_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.jsonl").write_text(rows('{"text": 5}'))
    command = ["prepare", "--source", str(tmp_path / "a.jsonl"), "--tokenizer", "byte", "--workers", "1"]
    command += ["--validation-fraction", "0", "--out", str(tmp_path / "out")]
    assert main([*command, "--max-bad-rows", "0"]) == 2
    assert "1 of 11 rows are bad, more than --max-bad-rows 0 allows" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, "--max-bad-rows", "0.1"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "out"}


def test_a_hopeless_table_is_not_read_to_its_end(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n' * 5000)
    with pytest.raises(ValueError, match=r"1,001 of 1,001 rows are bad, more than --max-bad-rows 0\.001"):
        read(tmp_path / "a.jsonl")


def test_the_summary_names_bad_rows_by_file_and_row(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(rows('{"text": 5}'))
    (tmp_path / "b.jsonl").write_text(rows(*['{"text": 6}'] * 7))
    output = prepared_output(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")
    assert "skipped 8 documents: bad row" in output
    assert f"{tmp_path / 'a.jsonl'}: row 11 (column 'text' holds int, not text)\n" in output
    assert f"{tmp_path / 'b.jsonl'}: row 11 (column" in output
    assert "row 15 (column 'text' holds int, not text) and 2 more\n" in output


def test_a_conversation_that_the_template_rejects_is_a_bad_row(tmp_path: Path):
    template = CHATML + "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = save_tokenizer(template, tmp_path / "tokenizer")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello!"}]
    rejected = [{"role": "user", "content": "no"}, chat[1]]
    lines = [
        json.dumps({"messages": messages}) + "\n" for messages in (chat, rejected, chat, [{"role": "x"}])
    ]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    request = PrepareRequest(
        source=[str(tmp_path / "chats.jsonl")],
        tokenizer=str(tokenizer),
        validation_fraction=0.0,
        chat=True,
        text_key="messages",
    )
    manifest = prepare(request, tmp_path / "out", workers=1, overwrite=False, console=Console(quiet=True))
    assert manifest is not None
    assert manifest.splits["train"].documents == 2
    assert manifest.skipped == {"bad row": 2}


def test_csv_of_the_file_tests_has_no_bad_row(tmp_path: Path):
    (tmp_path / "a.csv").write_text(csv_text())
    assert read(tmp_path / "a.csv")[1:] == ({}, [])
