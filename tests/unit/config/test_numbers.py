"""Every numeric key of every section refuses absurd values, keys added later included."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import ValidationError

import data_pipeline.papers.tasks  # their sections are tested too
import data_pipeline.synthetic.source  # noqa: F401
from megakernel.config import ConfigError, load, validate_section, yaml_text
from megakernel.config.cluster import Cluster
from megakernel.config.section import Section
from megakernel.config.training import Optimizer

from . import trees
from .trees import problems

ABSURD = (".nan", ".inf", "-.inf", "true", "1" + "0" * 300, "-1" + "0" * 300, "1e300", "-1e300", "1e-300")


def _sections(base: type[Section] = Section) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        yield section
        yield from _sections(section)


def _holders(annotation: Any) -> Iterator[Any]:
    """Functions from a number to a value of this type that contains it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in (int, float):
        yield lambda number: number
    elif origin is Annotated:
        yield from _holders(parts[0])
    elif origin in (Union, UnionType):
        for part in parts if bool not in parts else ():
            yield from _holders(part)
    elif origin is list:
        for holder in _holders(parts[0]):
            yield lambda number, holder=holder: [holder(number)]
    elif origin is tuple:
        for holder in _holders(parts[0]):
            yield lambda number, holder=holder: [holder(number), *[1] * len(parts[1:])]
    elif origin is Literal and any(isinstance(choice, int) for choice in parts):
        yield lambda number: number


def _numeric_keys() -> list[Any]:
    return [
        pytest.param(section, name, holder, id=f"{section.__name__}.{name}")
        for section in dict.fromkeys(_sections())
        for name, field in section.model_fields.items()
        for holder in _holders(field.annotation)
    ]


@pytest.mark.parametrize(("section", "name", "holder"), _numeric_keys())
def test_no_key_takes_an_absurd_number(section, name, holder):
    for text in ABSURD:
        number = yaml_text.parse(text, name)
        if (section, name, text) == (Optimizer, "clip_grad_norm", ".inf"):
            continue  # valid: gradients are never scaled
        with pytest.raises(ValidationError) as caught:
            section.model_validate({name: holder(number)})
        assert name in {error["loc"][0] for error in caught.value.errors()}, text


def test_the_numeric_keys_of_all_packages_are_found():
    found = {f"{parameter.values[0].__name__}.{parameter.values[1]}" for parameter in _numeric_keys()}
    assert len(found) > 120
    assert found >= {"Optimizer.lr", "Corpus.weight", "Near.gate_bias", "Cluster.nodes", "ListOps.max_length"}
    assert found >= {"Mixture.sigma2", "KeptLayers.keep", "Training.skip_samples", "LengthPhase.rope_base"}


@pytest.mark.parametrize(
    ("key", "text", "line"),
    [
        ("optimizer.lr", ".inf", "optimizer.lr=inf should be a finite number; change it (Peak learning rate)"),
        ("optimizer.lr", "1e300", "optimizer.lr=1e+300 is out of range for float32"),
        ("optimizer.eps", "1e-60", "optimizer.eps=1e-60 is 0 in float32"),
        ("training.steps", "true", "training.steps=True should be a number; change it (Optimizer steps of the"),
        ("run.seed", "1" + "0" * 24, "run.seed=1000000000000000000000000 is beyond 64 bits; change it (Seed"),
        ("model.num_layers", "1e9", "model.num_layers=1000000000.0 should be less than or equal to"),
        ("training.steps", "9" * 5000, "training.steps is not YAML (Exceeds the limit"),
    ],
)  # fmt: skip
def test_an_error_names_key_value_and_remedy(tmp_path, key, text, line):
    with pytest.raises(ConfigError) as caught:
        load(trees.file(tmp_path), [f"{key}={text}"])
    assert str(caught.value).startswith(line)


def test_valid_forms_of_numbers_are_read(tmp_path):
    given = [
        "optimizer.lr=1",
        "optimizer.eps=1e-3",
        "training.steps=1e3",
        'optimizer.beta2="0.9"',
        "run.seed=7",
    ]
    read = load(trees.file(tmp_path), [*given, "optimizer.clip_grad_norm=.inf", "optimizer.weight_decay=0"])
    assert (read.optimizer.lr, read.optimizer.eps, read.training.steps) == (1.0, 1e-3, 1000)
    assert load(trees.file(tmp_path), ["deepspeed.its_own=1e300"]).deepspeed == {"its_own": 1e300}
    assert (read.optimizer.beta2, read.optimizer.clip_grad_norm) == (0.9, float("inf"))


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"num_layers": 10**6}},
        {"model": {"hidden_size": 10**9, "num_heads": 10**9}},
        {"training": {"global_batch_size": 10**8}},
        {"parallel": {"timeout_minutes": 1e30}},
        {"parallel": {"pipeline": 10**9}},
        {"data": {"train": "x", "num_workers": 10**6}},
    ],
)
def test_impossible_sizes_are_refused(sections):
    assert any("less than or equal" in problem.reason for problem in problems(**sections).values())


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"mem": "lots"}, "mem"),
        ({"mem": "-1"}, "mem"),
        ({"nodes": 10**9}, "nodes"),
        ({"gpus_per_node": "nan"}, "gpus_per_node"),
        ({"time": "9" * 30}, "time"),
        ({"sbatch": {"ntasks-per-node": "lots"}}, "sbatch.ntasks-per-node"),
        ({"sbatch": {"ntasks-per-node": 0}}, "sbatch.ntasks-per-node"),
    ],
)
def test_impossible_cluster_resources_are_refused(tree, key):
    with pytest.raises(ConfigError) as caught:
        validate_section(Cluster, tree)
    assert {problem.key for problem in caught.value.problems} == {key}


@pytest.mark.parametrize("mem", ["0", "200G", "64000", "512gb", "1T"])
def test_memory_is_given_in_the_format_of_slurm(mem):
    assert validate_section(Cluster, {"mem": mem}).mem == mem
