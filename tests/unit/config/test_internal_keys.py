"""What programs record in a configuration: no help lists it, and its earlier places still load."""

import re
from pathlib import Path

import pytest

from launch.cli import main
from launch.configuration_page import page
from launch.exit_status import ExitStatus
from megakernel.config import ConfigError, Model, from_yaml, load, to_yaml
from megakernel.config.resume import check_same_run

from .trees import SMALLEST, config

INTERNAL = ("steps_before", "steps_after", "known_seq_len", "family")
RECORDED = {
    "model": {"family": "llama", "known_seq_len": 4096},
    "schedule": {"steps_before": 3, "steps_after": 4},
}


def as_earlier(text):
    """A recorded config.yaml as earlier versions wrote it, with these keys among those of users."""
    inner = re.compile(r"^  (?:imported|part):\n((?:    .*\n)+)", re.MULTILINE)
    return inner.sub(lambda found: found[1].replace("    ", "  "), text)


@pytest.fixture
def recorded():
    """A configuration with all of these keys set, written in their earlier places."""
    return config(**RECORDED)


def test_earlier_places_load_as_the_present_ones(recorded):
    imported, part = recorded.model.imported, recorded.schedule.part
    assert (imported.family, imported.known_seq_len) == ("llama", 4096)
    assert (part.steps_before, part.steps_after) == (3, 4)
    assert from_yaml(to_yaml(recorded)) == recorded


def test_a_run_of_an_earlier_version_resumes(recorded):
    earlier = as_earlier(to_yaml(recorded))
    assert "\n  steps_before: 3\n" in earlier
    assert "\n  family: llama\n" in earlier
    assert "imported" not in earlier
    assert check_same_run(earlier, recorded, Path("runs/x")) == []


def test_another_part_of_the_schedule_is_another_run(recorded):
    other = config(model=RECORDED["model"], schedule={"part": {"steps_before": 2, "steps_after": 4}})
    with pytest.raises(ConfigError, match=r"^schedule.part.steps_before=2 was 3 when the run began"):
        check_same_run(as_earlier(to_yaml(recorded)), other, Path("runs/x"))


def test_a_model_section_of_an_earlier_export_loads():
    """The config.json of an export of ours holds the model's section alone."""
    section = Model.model_validate({**SMALLEST["model"], **RECORDED["model"]})
    assert section.imported.family == "llama"


def test_a_key_in_both_places_is_refused():
    with pytest.raises(
        ConfigError, match=r"^schedule.steps_before=3 is also part.steps_before=5; leave out steps_"
    ):
        config(schedule={"steps_before": 3, "part": {"steps_before": 5}})


def test_a_wrong_value_at_an_earlier_place_is_named_by_its_present_one():
    with pytest.raises(
        ConfigError, match=r"^schedule.part.steps_before=-1 should be greater than or equal to 0"
    ):
        config(schedule={"steps_before": -1})


def test_no_help_lists_them(tmp_path, capsys):
    assert not [key for key in INTERNAL if f"`{key}`" in page()]
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config()))
    for section in ("model", "schedule"):
        assert main(["config", str(file), "--explain", section]) == ExitStatus.DONE
        shown = capsys.readouterr().out
        assert not [key for key in INTERNAL if f".{key}:" in shown]
    assert main(["config", str(file), "--explain", "schedule.part"]) == ExitStatus.USAGE
    with pytest.raises(ConfigError) as error:
        load(file, ["schedule.zzz=1"])
    assert "known here: name, warmup_steps, decay_steps, min_lr_ratio" in str(error.value)
    assert "part" not in str(error.value)
