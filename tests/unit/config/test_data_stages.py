"""Mixtures of a run: where they begin, and how they may change when it resumes."""

from pathlib import Path
from typing import Any

import pytest

from megakernel.config import (
    UNPROVEN,
    Config,
    ConfigError,
    check_same_run,
    from_yaml,
    in_recorded_order,
    to_yaml,
)
from megakernel.config.data_phases import data_phases, mixture_at, mixtures
from megakernel.config.yaml_text import parse, write

from .trees import config, problems

FOLDER = Path("runs/small")


def staged(*stages: dict[str, Any], **sections: Any) -> Config:
    """100 steps of data/x, then the stages."""
    return config(data={"stages": list(stages)}, **sections)


def grown(*until: tuple[int, int], **sections: Any) -> Config:
    """Steps of shorter sequences, as (until_step, seq_len), before those of 512 tokens."""
    training = {"seq_len_schedule": [{"until_step": step, "seq_len": length} for step, length in until]}
    return config(training=training, **sections)


def test_mixtures_cut_phases_and_batch_sizes_do_not():
    schedule = [
        {"until_step": 20, "seq_len": 256},
        {"until_step": 40, "global_batch_size": 4, "seq_len": 512},
    ]
    tree = staged(
        {"from_step": 10, "train": "data/y"},
        {"from_tokens": 50 * 8 * 512, "train": {"data/x": 1, "data/z": 3}},
        training={"seq_len_schedule": schedule},
    )
    found = [
        (
            part.phase.first_step,
            part.phase.end_step,
            part.phase.stream_start,
            part.phase.stream_end,
            part.mixture,
        )
        for part in data_phases(tree.data, tree.training)
    ]
    last = 40 + (50 * 8 * 512 - 20 * 8 * 256 - 20 * 4 * 512) // (8 * 512)
    assert found == [
        (0, 10, 0, 80, 0),
        (10, 20, 80, 160, 1),
        (20, 40, 160, 240 + 8 * (last - 40), 1),
        (40, last, 160, 240 + 8 * (last - 40), 1),
        (last, 100, 240 + 8 * (last - 40), None, 2),
    ]
    assert [mixture.key for mixture in mixtures(tree.data, tree.training)] == [
        "data.train",
        "data.stages.0.train",
        "data.stages.1.train",
    ]
    of_run = mixtures(tree.data, tree.training)
    assert [mixture_at(step, of_run) for step in (0, 9, 10, last - 1, last, 99)] == [*(0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize(
    ("stages", "key", "reason"),
    [
        ([{"train": "y"}], "data.stages.0.from_step", "are neither given"),
        ([{"train": "y", "from_step": 3, "from_tokens": 9}], "data.stages.0.from_step", "are both given"),
        ([{"train": {"y": 1, "z": None}, "from_step": 3}], "data.stages.0.train", "has no weight"),
        ([{"train": "y", "from_step": 0}], "data.stages.0.from_step", "greater than 0"),
        (
            [{"train": "y", "from_step": 9}, {"train": "z", "from_tokens": 9 * 8 * 512}],
            "data.stages.1.from_tokens",
            "is step 9, which does not come after the stage before it, from step 9",
        ),
    ],
)
def test_stages_without_a_place_are_refused(stages: list[Any], key: str, reason: str):
    found = problems(data={"stages": stages})
    assert reason in found[key].reason


def test_an_uptraining_has_no_stages():
    found = problems(
        data={"stages": [{"from_step": 3, "train": "y"}]}, uptrain={}, init={"from": "runs/dense"}
    )
    assert "uptrain makes several" in found["data.stages"].reason


def test_a_stage_may_follow_the_planned_steps_or_those_that_are_done():
    recorded, late = to_yaml(config()), staged({"from_step": 100, "train": "data/y"}, training={"steps": 120})
    assert {item.key for item in check_same_run(recorded, late, FOLDER)} == {"data.stages", "training.steps"}
    soon = staged({"from_step": 60, "train": "data/y"})
    with pytest.raises(ConfigError, match=r"^data\.stages=.* add --allow-change data\.stages$"):
        check_same_run(recorded, soon, FOLDER, done=60)
    assert check_same_run(recorded, soon, FOLDER, ["data.stages"], done=60)
    with pytest.raises(ConfigError, match=r"in the 61 steps that the run has done; .* from_step 61 on$"):
        check_same_run(recorded, soon, FOLDER, ["data.stages"], done=61)


def test_a_stage_that_has_begun_does_not_change():
    recorded = to_yaml(staged({"from_step": 60, "train": {"data/y": 1, "data/x": 1}}))
    for stages in (
        [{"from_step": 60, "train": {"data/y": 2, "data/x": 1}}],
        [{"from_step": 61, "train": "data/y"}],
        [],
    ):
        with pytest.raises(ConfigError, match=r"data\.stages=.* in the 70 steps that the run has done"):
            check_same_run(recorded, staged(*stages), FOLDER, ["data.stages"], done=70)
    further = staged(
        {"from_step": 60, "train": {"data/y": 1, "data/x": 1}}, {"from_step": 80, "train": "data/z"}
    )
    assert check_same_run(recorded, further, FOLDER, ["data.stages"], done=70)


def test_a_length_that_others_follow_gets_no_other_mixture_once_it_has_begun():
    stage = {"stages": [{"from_step": 30, "train": "data/y"}]}
    recorded = to_yaml(grown((40, 256)))
    with pytest.raises(
        ConfigError, match=r"data\.stages=.* sequences of 256 tokens .* begin from_step 40 on$"
    ):
        check_same_run(recorded, grown((40, 256), data=stage), FOLDER, ["data.stages"], done=20)
    assert check_same_run(recorded, grown((40, 256), data=stage), FOLDER, ["data.stages"], done=0)
    later = {"stages": [{"from_step": 40, "train": "data/y"}]}
    assert check_same_run(recorded, grown((40, 256), data=later), FOLDER, ["data.stages"], done=20)
    before = {"unread_first": False}
    old = to_yaml(grown((40, 256), data=before))
    assert check_same_run(old, grown((40, 256), data=stage | before), FOLDER, ["data.stages"], done=20)


def ordered(recorded: str, wanted: Config, root: Path) -> Config:
    """`wanted` as it starts in a run folder with this recorded configuration."""
    (root / "small").mkdir(exist_ok=True)
    (root / "small/config.yaml").write_text(recorded)
    return in_recorded_order(wanted)


def test_a_run_of_an_earlier_version_keeps_reading_each_length_from_the_start(tmp_path: Path):
    root = {"root": str(tmp_path)}
    tree = parse(to_yaml(grown((40, 256), run=root)), "config.yaml")
    for key in ("stages", "unread_first", "order"):
        del tree["data"][key]
    assert from_yaml(write(tree)).data.unread_first is False
    assert ordered(write(tree), grown((40, 256), run=root), tmp_path).data.unread_first is False
    assert ordered(UNPROVEN + write(tree), grown((40, 256), run=root), tmp_path).data.unread_first is True
    assert (
        from_yaml(
            "run: {name: small}\n"
            + write({"model": tree["model"], "training": tree["training"], "data": {"train": "data/x"}})
        ).data.unread_first
        is True
    ), "written by hand"


def planned_ends(tree: Config) -> list[int | None]:
    return [part.planned_end for part in data_phases(tree.data, tree.training)]


def test_where_a_length_was_to_end_is_kept(tmp_path: Path):
    root = {"root": str(tmp_path)}
    first = config(run=root)
    longer = {"steps": 200, "seq_len": 1024, "seq_len_schedule": [{"until_step": 100, "seq_len": 512}]}
    second = config(run=root, training=longer)
    assert planned_ends(second) == [800, None]
    kept = ordered(to_yaml(first), second, tmp_path)
    assert kept.data.order.planned_until == {512: 0}
    assert planned_ends(kept) == [None, None]
    again = ordered(to_yaml(kept), second, tmp_path)
    assert again == kept, "also at further starts"
    assert check_same_run(to_yaml(kept), second, tmp_path / "small") == []
    moved = {**longer, "seq_len_schedule": [{"until_step": 120, "seq_len": 512}]}
    moved_in = ordered(to_yaml(second), config(run=root, training=moved), tmp_path)
    assert moved_in.data.order.planned_until == {512: 100}
    assert planned_ends(moved_in) == [800, None]
