"""data.train and data.validation: the ways to name corpora, and their weights."""

from pathlib import Path

import pytest

from megakernel.config import UNPROVEN, ConfigError, check_same_run, from_yaml, in_recorded_order, to_yaml
from megakernel.config.yaml_text import parse, write

from .trees import config, problems

FOLDER = Path("runs/small")


def corpora(train: object) -> list[tuple[str, float | None]]:
    return [(str(corpus.path), corpus.weight) for corpus in config(data={"train": train}).data.train]


def test_corpora_are_named_as_a_path_a_list_or_with_weights():
    assert corpora("a") == [("a", None)]
    assert corpora(["a", "b"]) == [("a", None), ("b", None)]
    assert corpora({"a": 3, "b": 1}) == [("a", 3), ("b", 1)]
    assert corpora([{"path": "a", "weight": 3}, {"path": "b", "weight": 0.5}]) == [("a", 3), ("b", 0.5)]


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (0, "has the weight 0, which should be greater than 0"),
        ("much", "has the weight 'much', which should be a valid number, unable to parse string as a number"),
        (True, "has the weight True, which should be a number"),
    ],
)
def test_a_wrong_weight_is_named_with_its_corpus(weight, reason):
    line = f"data/sp ace {reason}; change its weight, or leave the corpus out"
    found = problems(data={"train": {"data/a": 1, "data/sp ace": weight}})
    assert str(found["data.train"]) == f"data.train={line}"
    found = problems(data={"stages": [{"train": {"data/sp ace": weight}, "from_step": 1}]})
    assert str(found["data.stages.0.train"]) == f"data.stages.0.train={line}"


def test_a_weight_for_some_corpora_only_is_refused():
    for key in ("train", "validation"):
        found = problems(data={key: ["a", {"path": "b", "weight": 2}]})
        assert str(found[f"data.{key}"]) == (
            f"data.{key}=a has no weight, but other corpora do; give each corpus a weight, or none of them"
        )


def test_a_pattern_is_every_folder_or_prefix_that_matches(tmp_path: Path):
    for name in ("web-2", "web-0", "web-1", ".web-3", "books"):
        (tmp_path / name).mkdir()
    for name in ("wiki_document.bin", "wiki_document.idx"):
        (tmp_path / name).touch()
    web = [(str(tmp_path / f"web-{i}"), None) for i in range(3)]
    assert corpora(f"{tmp_path}/web-*") == web
    assert corpora([f"{tmp_path}/books", f"{tmp_path}/web-[01]"]) == [(f"{tmp_path}/books", None), *web[:2]]
    assert corpora(f"{tmp_path}/w*") == [*web, (f"{tmp_path}/wiki_document", None)]
    # The folders may be made by a job that this one waits for.
    assert corpora(f"{tmp_path}/none-*") == [(f"{tmp_path}/none-*", None)]
    found = problems(data={"train": {f"{tmp_path}/web-*": 2, "books": 1}})
    assert "is a pattern with the weight 2, and no folder; write each folder" in str(found["data.train"])


def test_a_folder_whose_name_looks_like_a_pattern_is_itself(tmp_path: Path):
    (tmp_path / "web[1]").mkdir()
    assert corpora(f"{tmp_path}/web[1]") == [(f"{tmp_path}/web[1]", None)]


def test_a_prefix_may_be_given_with_the_ending_of_one_of_its_files(tmp_path: Path):
    assert corpora(["x/wiki.bin", "x/web.v1.idx", "x/web.v2"]) == [
        ("x/wiki", None), ("x/web.v1", None), ("x/web.v2", None)
    ]  # fmt: skip
    (tmp_path / "folder.bin").mkdir()
    assert corpora(f"{tmp_path}/folder.bin") == [(f"{tmp_path}/folder.bin", None)]


def recorded(train: object) -> str:
    """config.yaml of a run of an earlier version: no data.blend, and a weight for each corpus."""
    tree = parse(to_yaml(config(data={"train": train})), "config.yaml")
    for key in ("blend", "tokenizer", "verify"):
        del tree["data"][key]
    for corpus in tree["data"]["train"]:
        corpus["weight"] = corpus["weight"] or 1.0
    return write(tree)


def test_a_run_of_an_earlier_version_keeps_its_order_and_equal_shares(tmp_path: Path):
    wanted = config(run={"root": str(tmp_path)}, data={"train": ["a", "b"]})
    assert in_recorded_order(wanted) == wanted, "a new run"
    (tmp_path / "small").mkdir()
    file = tmp_path / "small/config.yaml"
    for text, expected in [
        (recorded(["a", "b"]), ("periodic", [1, 1])),
        (UNPROVEN + recorded(["a", "b"]), ("exact", [None, None])),
        (to_yaml(config(data={"train": ["a", "b"]})), ("exact", [None, None])),
        (to_yaml(config(data={"train": ["a", "b"], "blend": "periodic"})), ("periodic", [None, None])),
    ]:
        file.write_text(text)
        data = in_recorded_order(wanted).data
        assert (data.blend, [corpus.weight for corpus in data.train]) == expected
        check_same_run(text, wanted, tmp_path / "small")
    # What was read has not changed, so such a run evaluates as before.
    assert from_yaml(recorded(["a", "b"])).data.blend == "periodic"


def test_other_weights_or_corpora_of_an_earlier_run_are_refused():
    for text, train in [
        (recorded({"a": 3, "b": 1}), ["a", "b"]),
        (recorded(["a", "b"]), {"a": 2, "b": 1}),
        (recorded(["a", "b"]), ["a", "b", "c"]),
    ]:
        with pytest.raises(ConfigError, match=r"data\.train=.* was .* when the run began"):
            check_same_run(text, config(data={"train": train}), FOLDER)
    assert check_same_run(recorded({"a": 3, "b": 1}), config(data={"train": {"a": 3, "b": 1}}), FOLDER) == []
