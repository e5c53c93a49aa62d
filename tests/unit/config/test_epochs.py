"""training.epochs: the length of a run in passes over its corpora."""

import json
from pathlib import Path
from typing import Any

import pytest

from megakernel.config import ConfigError, check_same_run, load, to_yaml
from megakernel.config.epochs import with_steps

from .trees import config, file


def corpus(folder: Path, tokens: int, documents: int = 10) -> Path:
    """A folder with what a manifest says of its size."""
    folder.mkdir()
    (folder / "manifest.json").write_text(
        json.dumps({"splits": {"train": {"tokens": tokens, "documents": documents}}})
    )
    return folder


def steps(tmp_path: Path, train: Any, epochs: Any, **sections: Any) -> int:
    sections["training"] = {"steps": None, "epochs": epochs, **sections.get("training", {})}
    training = load(file(tmp_path, data={"train": train}, **sections)).training
    assert (training.epochs, training.tokens) == (None, None)
    return training.steps


@pytest.mark.parametrize(("epochs", "expected"), [(1, 13), (3, 38), (0.5, 7), (1e-9, 1)])
def test_steps_are_those_of_so_many_passes(epochs: float, expected: int, tmp_path: Path):
    # 101 samples of 512 tokens, 8 in a step.
    assert steps(tmp_path, str(corpus(tmp_path / "x", 101 * 512 + 1)), epochs) == expected


def test_several_corpora_are_one_pass_together_and_patterns_are_read(tmp_path: Path):
    for name, samples in (("web-0", 80), ("web-1", 40)):
        corpus(tmp_path / name, samples * 512 + 100)
    assert steps(tmp_path, [str(tmp_path / "web-0"), str(tmp_path / "web-1")], 2) == 30
    assert steps(tmp_path, str(tmp_path / "web-*"), 2) == 30


def test_a_classifier_counts_examples(tmp_path: Path):
    model = {"kind": "classifier", "attention": "softmax", "classifier": {"num_classes": 2, "documents": 2}}
    assert steps(tmp_path, str(corpus(tmp_path / "x", 10**6, 400)), 2, model=model) == 2 * 200 // 8


def test_an_encoder_decoder_counts_pairs(tmp_path: Path):
    folder = str(corpus(tmp_path / "x", 10**6, 400))
    training = {"steps": None, "epochs": 2, "seq_len": 512, "global_batch_size": 8}
    tree = {"model": {"kind": "encoder_decoder"}, "data": {"train": folder}, "training": training}
    found, problems = with_steps(tree)
    assert problems == []
    assert found["training"]["steps"] == 2 * 200 // 8


def test_more_epochs_continue_the_run(tmp_path: Path):
    folder = str(corpus(tmp_path / "x", 80 * 512 + 1))
    short = file(tmp_path, "short.yaml", data={"train": folder}, training={"steps": None, "epochs": 1})
    [change] = check_same_run(to_yaml(load(short)), load(short, ["training.epochs=2"]), tmp_path)
    assert (change.key, change.recorded, change.wanted) == ("training.steps", 10, 20)


@pytest.mark.parametrize(
    ("training", "data", "said"),
    [
        ({"steps": 100}, {}, "is given beside training.steps=100"),
        ({"tokens": 1000}, {}, "is given beside training.tokens=1000"),
        ({"epochs": 0}, {}, "is no number of passes"),
        ({"epochs": "many"}, {}, "is no number of passes"),
        ({"epochs": True}, {}, "is no number of passes"),
        (
            {"seq_len_schedule": [{"until_step": 5, "seq_len": 256}]},
            {},
            "there are training.seq_len_schedule",
        ),
        ({}, {"stages": [{"from_step": 5, "train": "y"}]}, "there are data.stages"),
        ({}, {"train": {"x": 1, "y": 2}}, "there are weights in data.train"),
        ({}, {"train": "nowhere"}, r"needs the size of data.train=nowhere, .*\(No such file"),
    ],
)
def test_a_length_that_is_not_known_is_refused(training: Any, data: Any, said: str, tmp_path: Path):
    data = {"train": str(corpus(tmp_path / "x", 10**5)), **data}
    training = {"steps": None, "epochs": 3, **training}
    with pytest.raises(ConfigError, match=rf"^training\.epochs=.*{said}") as caught:
        load(file(tmp_path, data=data, training=training))
    assert [problem.key for problem in caught.value.problems] == ["training.epochs"]


def test_another_wrong_key_is_reported_beside_it(tmp_path: Path):
    folder = str(corpus(tmp_path / "x", 10**5))
    with pytest.raises(ConfigError) as caught:
        load(file(tmp_path, data={"train": folder}, training={"steps": None, "epochs": 2, "seq_len": 0}))
    assert [problem.key for problem in caught.value.problems] == ["training.seq_len"]


def test_a_configuration_that_no_file_holds_has_no_epochs():
    with pytest.raises(ConfigError, match=r"training\.epochs=2.0 stands for steps that only"):
        config(training={"steps": None, "epochs": 2})
