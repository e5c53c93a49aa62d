"""The code of an exported model: one file from the package's sources that needs only torch and `transformers`."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from megakernel.checkpoint.standalone import code
from megakernel.checkpoint.standalone.code import code_of
from megakernel.checkpoint.standalone.folding import Known, fold
from megakernel.checkpoint.standalone.sources import Definition, Source, references
from megakernel.config import Model
from tests.tiers import tiered
from tests.unit.generation.test_decoder import PARTS
from tests.unit.uptraining.test_pretrained import build, texts

SIZES = {"num_layers": 1, "hidden_size": 32, "num_heads": 4}
FIRST = ["mixed", "linear"]


def loaded(folder):
    kind = get_class_from_dynamic_module("modeling_megakernel.MegakernelForCausalLM", str(folder))
    assert kind.__module__.startswith("transformers_modules.")
    model = kind.from_pretrained(folder).eval()
    # Copied, because tensors are aligned as in the file, and on some processors alignment changes the last bit.
    for x in (*model.parameters(), *model.buffers()):
        x.data = x.data.clone()
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", tiered(PARTS, FIRST))
def test_logits_equal_those_of_the_package_bit_for_bit(name, tmp_path):
    model = build(**PARTS[name])
    model.save_pretrained(tmp_path)
    exported, ids = loaded(tmp_path), texts(2, 33)
    for cached, autocast in ((True, False), (False, False), (False, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(exported(ids, use_cache=cached).logits, model(ids, use_cache=cached).logits)
    found, expected = (x(ids[:, :20]).past_key_values for x in (exported, model))
    for token in ids[:, 20:].split(1, 1):
        logits = model(token, past_key_values=expected).logits
        assert torch.equal(exported(token, past_key_values=found).logits, logits)


@pytest.mark.parametrize(
    "attention", tiered(["flurka", "linear", "softmax", "gmm_rks", "eva", "mgk"], ["linear"])
)
def test_the_code_has_no_undefined_names_or_other_imports(attention, tmp_path):
    text = code_of(Model(attention=attention, **SIZES))
    (tmp_path / "modeling.py").write_text(text)
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--isolated", "--select", "E9,F401,F8"]
    done = subprocess.run([*ruff, "--ignore", "F841", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "transformers", "packaging"}


def test_the_code_holds_only_the_models_mechanisms_and_names_its_sources():
    text = code_of(Model(attention="linear", **SIZES))
    assert text.splitlines()[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert "# megakernel/attention/kernel.py" in text
    assert "class KernelAttention" in text
    assert "class FlurkaAttention" not in text
    mixed = code_of(Model(**SIZES | PARTS["mixed"]))
    assert all(f"class {name}Attention" in mixed for name in ("Flurka", "Kernel", "Local", "Softmax"))


def test_the_same_sources_give_the_same_bytes():
    model = Model(attention="linear", **SIZES)
    text = code_of(model)
    code._code.cache_clear()
    assert code_of(model) == text


def test_the_oldest_supported_versions_are_those_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    needed = [Requirement(line) for line in setup["options"]["install_requires"].split("\n") if line]
    oldest = {item.name: str(item.specifier).removeprefix(">=") for item in needed}
    assert {name: oldest[name] for name in code.NEEDED} == code.NEEDED


@pytest.mark.parametrize("name", code.NEEDED)
def test_an_older_library_is_refused_in_one_line(name, tmp_path, monkeypatch):
    build(attention="linear").save_pretrained(tmp_path)
    monkeypatch.setattr(sys.modules[name], "__version__", "2.3.0")
    oldest = code.NEEDED[name]
    with pytest.raises(
        ImportError, match=rf"needs {name}>={oldest} and finds 2.3.0; pip install -U"
    ) as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


FAULTS = {
    "another mechanism": (
        {"attention": {"near": {"block_size": 8}}},
        "has attention that no layer had when this was exported",
    ),
    "an unknown key": ({"widht": 3}, "config.json: widht is no key of Model; remove it"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_configuration_that_the_code_does_not_support_is_refused(fault, tmp_path):
    build(attention="linear").save_pretrained(tmp_path)
    changes, text = FAULTS[fault]
    kind = get_class_from_dynamic_module("modeling_megakernel.MegakernelForCausalLM", str(tmp_path))
    config = kind.config_class.from_pretrained(tmp_path)
    config.model = {**config.model, **changes}
    with pytest.raises(ValueError, match=text) as caught:
        kind(config)
    assert "\n" not in str(caught.value)


def test_a_missing_weight_file_is_named_in_one_line(tmp_path):
    build(attention="linear").save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: {lost}") as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_text_longer_than_the_learned_positions_is_refused(tmp_path):
    build(**PARTS["learned positions, tied"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a text of 65 tokens exceeds the model's 64 learned positions"):
        loaded(tmp_path)(texts(1, 65))


ABSENT = Definition("megakernel.example", "absent")


def folded(text):
    source = Source("megakernel.example", text.encode())
    fold(source, Known({"tp.size": 1, "alone()": True}, ("triton",), {}, ABSENT, {}, (), (), ()))
    return source.text(0, len(source.content))


def test_dead_branches_are_removed_and_the_rest_is_unchanged():
    before = '''
def f(x, tp):
    # Of ranks, or none.
    if tp.size > 1:
        import megatron
        return megatron.f(x)
    elif x:  # é
        y = x + 1
    elif tp.size == 2:
        y = 3
    else:
        y = 2
    group = x if tp.size > 1 and x else None
    forms = {"chunked": f, "triton": g}
    if alone():
        # Stays.
        y = f(y)

        return (y,
                group, forms, """
  text""")
    return forms
'''
    after = '''
def f(x, tp):
    # Of ranks, or none.
    if x:  # é
        y = x + 1
    else:
        y = 2
    group = None
    forms = {"chunked": f}
    # Stays.
    y = f(y)

    return (y,
            group, forms, """
  text""")
'''
    assert folded(before) == after


def test_local_variables_shadow_module_names():
    text = "def f(a, b=outer):\n    c = [d for d in a if e]\n    return lambda a: a + c + g\n"
    (function,) = ast.parse(text).body
    assert [(x.node.id, x.at_import) for x in references(function)] == [
        ("outer", True),
        ("e", False),
        ("g", False),
    ]
