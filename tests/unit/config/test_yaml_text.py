import math

import pytest

from megakernel.config import ConfigError
from megakernel.config.yaml_text import parse, read, write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("3E+2", 300.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("20_000", 20_000),
        ("-7", -7),
        ("true", True),
        ("null", None),
        ("~", None),
    ],
)
def test_numbers_are_parsed_to_their_type(text, value):
    parsed = parse(text, "test")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["no", "on", "12:30", "2024-01-01", "010", "1e", "e3"])
def test_words_with_another_meaning_in_yaml_1_1_stay_text(text):
    assert parse(text, "test") == text


@pytest.mark.parametrize(
    "value",
    [
        "",
        "~",
        "1e-3",
        "true",
        "no",
        "a: b",
        "#",
        "-",
        "ümlaut",
        "line\nbreak",
        1e-3,
        1e300,
        -math.inf,
        10**20,
        None,
        [],
    ],
)
def test_written_values_read_back_equal(value):
    tree = {"key": value, "list": [value, {"inner": value}]}
    assert parse(write(tree), "test") == tree


def test_every_repeated_key_is_refused_with_both_lines():
    with pytest.raises(ConfigError) as caught:
        parse("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n", "run.yaml")
    assert [str(problem) for problem in caught.value.problems] == [
        "run.yaml:5 repeats key 'a' of line 1; keep one of them",
        "run.yaml:4 repeats key 'c' of line 3; keep one of them",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "a: b: c",
        "a: 1\n\tb: 2",
        "\x00",
        "? [1]\n: 2",
        "a: !!python/name:os.x 1",
        'a: !!int ""',
        "a: !!bool foo",
        "a: !!timestamp foo",
        "a: !!map [1]",
        'a: "\\ud800"',
        '{"\\udfff": 1}',
        "9" * 5000,
    ],
)
def test_invalid_yaml_is_refused_in_one_line_with_its_location(text):
    with pytest.raises(ConfigError, match=r"^run\.yaml.* is not YAML .*") as caught:
        parse(text, "run.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"), [(b"- a\n", "holds no sections"), (b"\xff\xfe", "is not UTF-8 text")]
)
def test_an_unreadable_configuration_file_is_named(tmp_path, content, reason):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"run.yaml {reason}"):
        read(path)
