"""The JSON schema accepts what the loader accepts of single keys, and refuses what it refuses."""

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from megakernel.config import Config, load, to_yaml, yaml_text
from megakernel.config.cluster import Cluster, load_cluster
from megakernel.config.errors import ConfigError
from megakernel.config.json_schema import json_schema
from megakernel.config.load import interpolate
from megakernel.config.section import in_yaml_words, merged
from megakernel.config.validation import section_in, validate

from .test_internal_keys import RECORDED, as_earlier
from .trees import SMALLEST, config

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
SCHEMAS = {section: json_schema(section) for section in (Config, Cluster)}
VALIDATORS = {section: Draft202012Validator(schema) for section, schema in SCHEMAS.items()}


def accepted(tree, section=Config):
    return VALIDATORS[section].is_valid(tree)


def loads(tree):
    try:
        plain, unset = interpolate(merged(SMALLEST, tree), {"WIDTH": "256"})
        validate(plain, unset)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("section", SCHEMAS)
def test_it_is_a_schema_of_its_draft(section):
    Draft202012Validator.check_schema(SCHEMAS[section])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_file_is_valid(path):
    section = Cluster if path.parent.name == "cluster" else Config
    found = [
        f"{error.json_path}: {error.message}"
        for error in VALIDATORS[section].iter_errors(yaml_text.read(path))
    ]
    assert found == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_a_run_records_is_valid(path):
    assert accepted(yaml_text.parse(to_yaml(load(path)), "config.yaml"))


def test_what_earlier_versions_recorded_is_valid():
    earlier = yaml_text.parse(as_earlier(to_yaml(config(**RECORDED))), "config.yaml")
    assert earlier["schedule"]["steps_before"] == 3
    assert accepted(earlier)


_BLOCKS = {"similarity": "kernel", "feature_map": {"name": "elu"}, "near": {"kind": "softmax"}}

RIGHT = {
    "a preset": {"model": {"attention": "retnet"}},
    "a preset with changes": {"model": {"attention": {"preset": "flurka", "near": {"blocks": 2}}}},
    "presets by layer": {"model": {"attention_pattern": ["main", "softmax", {"preset": "local"}]}},
    "compression without its kind": {"model": {"attention": {**_BLOCKS, "compression": {"rank": 4}}}},
    "another kind of compression": {
        "model": {"kind": "masked_lm", "attention": {"compression": {"kind": "linformer", "rank": 4}}},
        "data": {"isolate_documents": False},
    },
    "one corpus": {"data": {"train": "data/a"}},
    "a corpus with keys": {"data": {"train": {"path": "data/a", "weight": 2}}},
    "corpora": {"data": {"train": ["data/a", {"path": "data/b"}]}},
    "weights of corpora": {"data": {"train": {"data/a": 2, "data/b": 0.5}}},
    "a section with nothing below it": {"optimizer": None},
    "an optional section that is left out": {"model": {"attention": {"similarity": "softmax", "near": None}}},
    "a variable for a number": {"model": {"hidden_size": "${WIDTH}"}},
    "a variable with a default": {"training": {"dtype": "${DTYPE:-float32}"}, "parallel": {"zero_stage": 0}},
    "a variable in a name": {"run": {"name": "of-${WIDTH}"}},
    "a number as YAML 1.2 reads 20_000": {"training": {"steps": "20_000"}},
    "a number in quotes": {"optimizer": {"lr": "2e-3"}},
    "no": {"model": {"bias": "no"}},
    "no clipping": {"optimizer": {"clip_grad_norm": float("inf")}},
    "null for a default of the map": {
        "model": {"attention": {"similarity": "kernel", "feature_map": {"name": "rff", "smoothing": None}}}
    },
    "DeepSpeed's keys": {"deepspeed": {"wall_clock_breakdown": True}},
    "phases": {"training": {"seq_len_schedule": [{"until_step": 10, "seq_len": 256}]}},
}

WRONG = {
    "an unknown section": {"trainig": {"steps": 3}},
    "an unknown key": {"training": {"stepz": 3}},
    "an unknown key of an attention": {"model": {"attention": {"preset": "flurka", "nearr": {}}}},
    "a preset that is none": {"model": {"attention": "flurkka"}},
    "a preset that is none, with changes": {"model": {"attention": {"preset": "flurkka"}}},
    "a choice that is none": {"training": {"dtype": "bf16"}},
    "text for a number": {"training": {"steps": "many"}},
    "a share of a step": {"training": {"steps": 1.5}},
    "a number for a switch": {"model": {"bias": 3}},
    "a bound": {"optimizer": {"lr": 0}},
    "a list for a number": {"model": {"num_layers": [2]}},
    "a number for a section": {"model": 3},
    "null for a number": {"training": {"steps": None}},
    "a name that is no file name": {"run": {"name": "a/b"}},
    "a corpus without its path": {"data": {"train": [{"weight": 2}]}},
    "a weight of nothing": {"data": {"train": {"data/a": 0}}},
    "a phase without its length": {"training": {"seq_len_schedule": [{"until_step": 10}]}},
    "a range of three": {"training": {"skip_samples": [[1, 2, 3]]}},
}


@pytest.mark.parametrize("case", RIGHT)
def test_schema_and_loader_accept(case):
    assert loads(RIGHT[case])
    assert accepted(RIGHT[case])


@pytest.mark.parametrize("case", WRONG)
def test_schema_and_loader_refuse(case):
    assert not loads(WRONG[case])
    assert not accepted(WRONG[case])


def test_other_files_are_named_by_one_name_or_a_list():
    assert accepted({"extends": "base.yaml"})
    assert accepted({"extends": ["a.yaml", "b.yaml"]})
    assert not accepted({"extends": 3})


def test_a_cluster_file_is_no_run(tmp_path):
    tree = {"nodes": 2, "gpu_type": "h100", "container": {"image": "x.sqsh"}}
    (tmp_path / "mine.yaml").write_text(yaml_text.write(tree))
    assert load_cluster(tmp_path / "mine.yaml", {}).nodes == 2
    assert accepted(tree, Cluster)
    assert not accepted(tree)
    assert not accepted({"nodes": 0}, Cluster)
    assert not accepted({"nodes": None}, Cluster)
    assert not accepted({"container": {"runtime": "docker"}}, Cluster)


def described(section):
    for name, field in section.model_fields.items():
        yield section, name, field
        inner = section_in(field.annotation)
        if inner is not None:
            yield from described(inner)


@pytest.mark.parametrize("section", SCHEMAS)
def test_every_key_has_its_meaning(section):
    keys = list(described(section))
    assert len(keys) > 20
    for owner, name, field in keys:
        schema = SCHEMAS[section] if owner is section else SCHEMAS[section]["$defs"][owner.__name__]
        if field.description:
            assert schema["properties"][name]["description"] == in_yaml_words(field.description)
