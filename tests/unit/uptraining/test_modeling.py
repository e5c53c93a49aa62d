"""Exported model files, written by hand: the numbers of the package, and what other programs ask of a model."""

import ast
import configparser
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from huggingface_hub.errors import StrictDataclassError
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.dense.own import PACKAGE, kind_of, own_config, own_parts, package_mechanisms
from megakernel.checkpoint.export import write_tensors
from megakernel.checkpoint.modeling.joined import PARTS as FILES
from megakernel.checkpoint.pretrained_config import MegakernelConfig, code_of
from megakernel.config import PRESETS, Attention, Model, expand_preset
from megakernel.model import LanguageModel
from tests.tiers import tiered
from tests.unit.generation import small_models
from tests.unit.generation.small_models import BLOCKS, FLURKA
from tests.unit.generation.test_decoder import ATTENTION, EOD, PARTS

REPOSITORY = Path(__file__).parents[3]
SHIPPED = [
    REPOSITORY / "configs" / "demo.yaml",
    *sorted((REPOSITORY / "configs" / "model").glob("*[mb].yaml")),
]
SIZES = {"num_layers": 1, "hidden_size": 32, "num_heads": 4}
WRITTEN = [name for name, tree in ATTENTION.items() if kind_of(Attention(**expand_preset(tree))) != PACKAGE]
IMPORTED = [name for name in ATTENTION if name not in WRITTEN]

ROPES = {
    "linear": {"factor": 2.0},
    "ntk": {"factor": 2.0},
    "dynamic": {"factor": 2.0, "original_seq_len": 8, "seq_len": 32},
    "yarn": {"factor": 4.0, "original_seq_len": 8},
    "yarn between pairs": {"kind": "yarn", "factor": 4.0, "original_seq_len": 8, "beta_slow": 0.1}
    | {"truncate": False},
    "llama3": {"factor": 4.0, "original_seq_len": 8},
    "longrope": {"original_seq_len": 8, "seq_len": 64, "factor": 4.0}
    | {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
}
FLURKAS = {
    "per head, shared E": {"compression": {"per_head": True, "share_kv": True}},
    "gate per head": {"near": {"gate": "head"}},
    "one normalizer": {"near": {"join": "shared"}},
    "centroids": {"far_rope": "centroid"},
    "two blocks": {"near": {"blocks": 2}},
    "phi near and far, two blocks, centroids": {
        "preset": "flurka_kernel",
        "near": {"blocks": 2},
        "far_rope": "centroid",
    },
    "fixed decay": {"far_decay": "fixed"},
    "gated decay of phi": {"preset": "flurka_kernel", "far_decay": "gate"},
    "performer": {"feature_map": {"name": "favor"}},
    "performer, one normalizer, decay": {
        "feature_map": {"name": "favor", "smoothing": 0.1},
        "near": {"join": "shared"},
        "far_decay": "gate",
    },
    "cosines": {"feature_map": {"name": "rff"}, "near": {"join": "shared"}},
    "elu": {"feature_map": {"name": "elu"}, "near": {"join": "shared"}},
    "relu": {"feature_map": {"name": "relu"}, "near": {"join": "shared"}},
}


def flurka(changes):
    tree = {"preset": "flurka", **changes}
    return {**tree, "compression": {**BLOCKS["compression"], **tree.get("compression", {})}}


GLA = {"mechanism": "simple_gla"}
CASES = {
    **{name: {"attention": ATTENTION[name]} for name in WRITTEN},
    **{f"flurka, {name}": {"attention": flurka(changes)} for name, changes in FLURKAS.items()},
    **{f"{kind} rotary": {"rope_scaling": {"kind": kind} | keys} for kind, keys in ROPES.items()},
    "simple gla": {"attention": GLA},
    "no decay": {"attention": {**GLA, "simple_gla": {"decay": "none"}}},
    "delta rule, fixed decay": {"attention": {**GLA, "simple_gla": {"update": "delta", "decay": "fixed"}}},
    "softmax, window": {"attention": {"preset": "softmax", "window": 5}},
    "identity": {
        "attention": {"similarity": "kernel", "feature_map": {"name": "identity", "smoothing": 1.0}}
    },
    "local, two blocks": {"attention": {"preset": "local", "near": {"block_size": 8, "blocks": 2}}},
    "sinusoidal": {"attention": "softmax", "position": "sinusoidal", "embedding_init_std": 0.5},
    "flurka with all parts": {
        "attention": {**FLURKA, "short_convolution": 3, "output_norm": True, "output_gate": "sigmoid"}
    },
    "parallel residual": {"attention": FLURKA, "parallel_residual": True, "rotary_share": 0.5, "bias": True},
    "normalized residual": {"attention": FLURKA, "normalized_residual": True, "head_dim": 16},
    **{name: parts for name, parts in PARTS.items() if name not in ATTENTION},
}
FIRST = ["flurka", "mixed", "performer", "gated_deltanet", "as gemma", "yarn rotary"]


def exported(folder, model):
    """Write the folder that `megakernel export` writes for the weights of this `LanguageModel`."""
    section = model.settings.model.model_copy(
        update={"vocab_size": model.settings.vocab_size, "vocab_multiple": 1}
    )
    config = MegakernelConfig(
        **own_config(section), eos_token_id=EOD, max_position_embeddings=64, dtype="float32"
    )
    config.architectures = ["MegakernelForCausalLM"]
    config.save_pretrained(folder)
    state = model.state_dict()
    parts = own_parts(state, section)
    write_tensors(
        folder, (x for name in parts for x in zip(parts[name].hf_names, parts[name].split(state[name])))
    )
    return folder


def loaded(folder, **options):
    """The model of the folder's own file, as `trust_remote_code` loads it."""
    kind = get_class_from_dynamic_module("modeling_megakernel.MegakernelForCausalLM", str(folder))
    assert kind.__module__.startswith("transformers_modules.")
    return kind.from_pretrained(folder, **options).eval()


def texts(rows, length, seed=1):
    return torch.randint(EOD, (rows, length), generator=torch.Generator().manual_seed(seed))


def pair(folder, **parts):
    """The package's model in float64, and the exported one."""
    ours = small_models.build(**parts).double()
    return ours, loaded(exported(folder, ours), dtype=torch.float64)


def exact(actual, expected):
    # float64 numbers of order 1, summed in another order.
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def positions_of(ids):
    return torch.arange(ids.shape[1]).expand(len(ids), -1)


@torch.no_grad()
@pytest.mark.parametrize("case", tiered(CASES, FIRST))
def test_logits_and_decoding_steps_equal_the_packages(case, tmp_path):
    ours, theirs = pair(tmp_path, **CASES[case])
    ids = texts(2, 43)
    expected = ours.logits(ours.hidden(ids, positions_of(ids)))
    assert expected.std() > 0.05
    exact(theirs(ids, use_cache=False).logits, expected)
    step = theirs(ids[:, :21])
    exact(step.logits, expected[:, :21])
    steps = [theirs(token, past_key_values=step.past_key_values).logits for token in ids[:, 21:].split(1, 1)]
    exact(torch.cat(steps, 1), expected[:, 21:])
    # And in float32, in which it is used. The delta rule and phi(x) = x, with weights of both signs, lose most digits.
    torch.testing.assert_close(loaded(tmp_path)(ids).logits.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", tiered(CASES, FIRST))
def test_gradients_equal_the_packages(case, tmp_path):
    ours, theirs = pair(tmp_path, **CASES[case])
    ids = texts(2, 43)
    expected = ours.logits(ours.hidden(ids, positions_of(ids)))
    for logits in (expected, theirs.train()(ids).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: x.grad for name, x in theirs.named_parameters()}
    for name, part in own_parts(dict(ours.named_parameters()), theirs_section(tmp_path)).items():
        for theirs_name, expected in zip(part.hf_names, part.split(ours.get_parameter(name).grad)):
            exact(gradients[theirs_name], expected)


def theirs_section(folder):
    return MegakernelConfig.from_pretrained(folder).section


@torch.no_grad()
@pytest.mark.parametrize("case", tiered(CASES, FIRST))
def test_packed_documents_and_padding_are_read_as_in_the_package(case, tmp_path):
    ours, theirs = pair(tmp_path, **CASES[case])
    # Documents of 10, 25 and 8 tokens in one row, and one of 43 in another.
    ids = texts(2, 43)
    places = torch.stack([torch.cat([torch.arange(n) for n in (10, 25, 8)]), torch.arange(43)])
    expected = ours.logits(ours.hidden(ids, places))
    exact(theirs(ids, position_ids=places).logits, expected)
    first = theirs(ids[:, :17], position_ids=places[:, :17])
    rest = theirs(ids[:, 17:], position_ids=places[:, 17:], past_key_values=first.past_key_values)
    exact(torch.cat([first.logits, rest.logits], 1), expected)
    # Padding on the left, on the right, and a text of 20 tokens between.
    mask = torch.ones_like(ids)
    mask[0, :15], mask[0, 35:] = 0, 0
    alone = theirs(ids[:1, 15:35]).logits
    exact(theirs(ids, attention_mask=mask).logits[0, 15:35], alone[0])


@pytest.mark.parametrize("case", tiered(CASES, FIRST))
def test_generated_texts_are_those_of_single_steps(case, tmp_path):
    _, model = pair(tmp_path, **CASES[case])
    rows = [texts(1, n, seed=n)[0] for n in (21, 9)]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": EOD, "suppress_tokens": [EOD]}
    ids = torch.stack([F.pad(row, (21 - len(row), 0), value=EOD) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (21 - len(row), 0)) for row in rows])
    together = model.generate(ids, attention_mask=mask, **options)[:, 21:]
    for row, found in zip(rows, together):
        tokens, cache = row[None], None
        for _ in range(12):
            with torch.no_grad():
                step = model(tokens if cache is None else tokens[:, -1:], past_key_values=cache)
            cache, logits = step.past_key_values, step.logits[0, -1]
            logits[EOD] = -torch.inf
            tokens = torch.cat([tokens, logits.argmax()[None, None]], 1)
        assert found.tolist() == tokens[0, len(row) :].tolist()


@pytest.mark.parametrize("case", tiered(CASES, FIRST))
def test_mechanisms_do_not_take_part_in_autocast(case, tmp_path):
    """`Trainer(bf16=True)` computes under it, and a state is a sum over many tokens."""
    ours, _ = pair(tmp_path, **CASES[case])
    model, ids, calls = loaded(tmp_path), texts(2, 43), []
    for layer in model.model.layers:
        layer.self_attn.core.register_forward_hook(lambda core, *call: calls.append((core.forward, *call)))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    for core, inputs, outputs in calls:
        leaves = (pytree.tree_leaves(outputs), pytree.tree_leaves(core(*inputs)))
        assert all(torch.equal(under, without) for under, without in zip(*leaves, strict=True))
    expected = ours.logits(ours.hidden(ids, positions_of(ids)))
    # Matrices of bfloat16 numbers, with 8 bits, in two to four layers. Weights q.k of both signs nearly cancel.
    assert (logits - expected).std() < (0.5 if case == "identity" else 0.05) * expected.std()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", tiered(CASES, FIRST))
def test_a_saved_model_loads_bit_for_bit_in_both_dtypes(case, dtype, tmp_path):
    folder = exported(tmp_path / "first", small_models.build(**CASES[case]))
    model, ids = loaded(folder, dtype=dtype), texts(2, 24)
    assert {x.dtype for x in model.parameters()} == {dtype}
    logits = model(ids).logits
    assert logits.dtype == dtype
    assert bool(logits.isfinite().all())
    model.save_pretrained(tmp_path / "again")
    again = loaded(tmp_path / "again")
    assert again.dtype == dtype
    assert torch.equal(again(ids).logits, logits)
    assert (tmp_path / "again" / "modeling_megakernel.py").read_bytes() == (
        folder / "modeling_megakernel.py"
    ).read_bytes()
    first, second = (
        json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "again")
    )
    assert second == first | {"dtype": str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("case", tiered(CASES, [*FIRST, "flurka_decay"]))
def test_a_file_is_short_clean_and_needs_torch_and_transformers_alone(case, tmp_path):
    text = code_of(Model(**SIZES | {"num_layers": 4} | CASES[case]))
    # One mechanism, or up to four of them, or with scaled frequencies and all optional parts.
    assert len(text.splitlines()) <= (940 if case in ATTENTION else 1050)
    file = tmp_path / "modeling_megakernel.py"
    file.write_text(text)
    ruff = str(Path(sys.executable).with_name("ruff"))
    settings = ["--config", str(REPOSITORY / "pyproject.toml"), "--no-cache", str(file)]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, *settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "transformers", "huggingface_hub"}


@pytest.mark.parametrize("file", SHIPPED, ids=[file.stem for file in SHIPPED])
def test_files_of_the_shipped_models_are_short(file):
    section = yaml.safe_load(file.read_text())["model"]
    assert len(code_of(Model(**section)).splitlines()) <= 940


def test_a_file_has_only_the_mechanisms_of_the_model():
    def classes(**parts):
        tree = ast.parse(code_of(Model(**SIZES | parts)))
        return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}

    linear = classes(attention="linear")
    assert {"KernelAttention", "PlainFeatures"} <= linear
    others = {"FlurkaAttention", "Hedgehog", "RandomFeatures", "SoftmaxAttention", "ShortConvolution"}
    assert not linear & others
    assert {"FlurkaAttention", "Hedgehog"} <= classes(attention="flurka")
    assert "DecayingFlurkaAttention" not in classes(attention="flurka")
    mixed = classes(**PARTS["mixed"] | {"num_layers": 4})
    assert {f"{name}Attention" for name in ("Flurka", "Kernel", "Local", "Softmax")} <= mixed


def test_every_preset_for_decoders_has_a_file_or_is_named_as_one_of_the_package():
    kinds = {name: kind_of(Attention(**expand_preset(name))) for name in PRESETS}
    assert set(kinds.values()) <= {*FILES, PACKAGE}
    for name in ("softmax", "local", "linear", "performer", "hedgehog", "rff", "flurka", "flurka_decay"):
        assert kinds[name] != PACKAGE
    for name in ("flurka_kernel", "retnet", "mamba2", "gated_deltanet"):
        assert kinds[name] != PACKAGE


@pytest.mark.parametrize("decay", ["none", "fixed", "gate"])
def test_chosen_blocks_are_never_left_out_of_an_exported_flurka(decay):
    attention = Attention(**expand_preset({"preset": "flurka_selected", "far_decay": decay}))
    assert kind_of(attention) == PACKAGE


@torch.no_grad()
@pytest.mark.parametrize("name", tiered(IMPORTED, ["mgk", "gmm_rks"]))
def test_other_mechanisms_are_imported_from_the_package(name, tmp_path):
    ours = small_models.build(attention=ATTENTION[name])
    folder = exported(tmp_path, ours)
    text = (folder / "modeling_megakernel.py").read_text()
    assert "It needs Megakernel installed" in text
    assert package_mechanisms(ours.settings.model)[0] in text
    model, ids = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval(), texts(2, 43)
    expected = ours.logits(ours.hidden(ids, positions_of(ids)))
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-6, rtol=1e-5)
    step = model(ids[:, :30])
    logits = model(ids[:, 30:], past_key_values=step.past_key_values).logits
    torch.testing.assert_close(logits, expected[:, 30:], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("case", ["flurka", "mixed", "as gemma", "mamba2", "flurka_mixture"])
def test_the_package_reads_the_folder_back(case, tmp_path):
    parts = CASES.get(case) or {"attention": ATTENTION[case]}
    ours = small_models.build(**parts)
    checkpoint = DenseCheckpoint(exported(tmp_path, ours))
    assert checkpoint.model.attentions == ours.settings.model.attentions
    state = ours.state_dict()
    assert checkpoint.names == state.keys()
    for name, expected in state.items():
        assert torch.equal(checkpoint.read(name)["fp32"], expected), name


def earlier(folder, ours):
    """A folder as earlier versions exported it: a model section in config.json, and our names of tensors."""
    section = ours.settings.model
    config = {
        "model_type": "megakernel",
        "architectures": ["MegakernelForCausalLM"],
        "model": section.model_dump(mode="json"),
        "vocab_size": ours.settings.vocab_size,
        "max_position_embeddings": 64,
        "isolate_documents": True,
        "eos_token_id": EOD,
        "hidden_size": section.hidden_size,
        "num_hidden_layers": section.num_layers,
        "num_attention_heads": section.num_heads,
        "tie_word_embeddings": section.tie_embeddings,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {f"model.{name}": x.contiguous() for name, x in ours.state_dict().items()},
        folder / "model.safetensors",
    )
    return folder


@torch.no_grad()
@pytest.mark.parametrize(
    "case", ["flurka", "gated_deltanet", "mixed", "as gemma", "flurka_mixture", "untied"]
)
def test_a_folder_of_an_earlier_version_is_read(case, tmp_path):
    from megakernel.checkpoint.pretrained import MegakernelForCausalLM

    ours = small_models.build(**(CASES.get(case) or {"attention": ATTENTION[case]}))
    folder = earlier(tmp_path, ours)
    checkpoint = DenseCheckpoint(folder)
    for name, expected in ours.state_dict().items():
        assert torch.equal(checkpoint.read(name)["fp32"], expected), name
    ids = texts(2, 24)
    logits = MegakernelForCausalLM.from_pretrained(folder).eval()(ids).logits
    # Tensors of a mapped file lie at any address, and the CPU sums unaligned ones in another order.
    torch.testing.assert_close(logits, ours.logits(ours.hidden(ids, positions_of(ids))), atol=1e-5, rtol=1e-5)
    assert isinstance(ours, LanguageModel)


def test_the_oldest_supported_versions_are_those_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    lines = setup["options"]["install_requires"] + setup["options.extras_require"]["hf"]
    needed = [Requirement(line) for line in lines.split("\n") if line]
    oldest = {item.name: str(item.specifier) for item in needed}
    text = code_of(Model(attention="linear", **SIZES))
    assert f'("torch{oldest["torch"]}", "transformers{oldest["transformers"]}")' in text


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_an_older_library_is_refused_with_the_command_that_renews_it(name, tmp_path, monkeypatch):
    folder = exported(tmp_path, small_models.build(attention="linear"))
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda of: "2.3.0" if of == name else version(of))
    with pytest.raises(
        ImportError, match=rf"{name}>=[\d.]+ is required .* found {name}==2.3.0.\s+pip install -U"
    ):
        loaded(folder)


# What other programs ask of a model.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    parts = {"logits_scaling": 4.0, "final_logit_softcapping": 2.0, "num_layers": 3}
    return exported(tmp_path_factory.mktemp("model"), small_models.build(attention=FLURKA, **parts))


def own(folder, name="ForCausalLM"):
    """A class of the folder's file. Auto classes give the package's, where that is imported."""
    return get_class_from_dynamic_module(f"modeling_megakernel.Megakernel{name}", str(folder))


def auto(folder, name="ForCausalLM", **options):
    return own(folder, name).from_pretrained(folder, **options).eval()


@torch.no_grad()
def test_the_chunked_loss_of_trl_is_the_models(folder):
    """TRL calls the base model, and multiplies its hidden states by the head under keys of the configuration."""
    model, ids = auto(folder), texts(2, 40)
    assert model.base_model is model.model is model.get_decoder()
    head = model.get_output_embeddings()
    assert head is model.lm_head
    assert head.weight is model.get_input_embeddings().weight
    assert head.bias is None
    hidden = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    assert hidden.past_key_values is None
    logits = head(hidden.last_hidden_state) / model.config.logits_scaling
    cap = model.config.final_logit_softcapping
    logits = cap * (logits / cap).tanh()
    expected = model(ids, labels=ids)
    torch.testing.assert_close(logits, expected.logits)
    torch.testing.assert_close(
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), expected.loss
    )
    written = json.loads((folder / "config.json").read_text())
    assert (written["logits_scaling"], written["final_logit_softcapping"]) == (4.0, 2.0)


@torch.no_grad()
def test_classes_load_the_model_with_and_without_its_head(folder):
    written = json.loads((folder / "config.json").read_text())
    assert written["auto_map"].keys() == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    base, whole, ids = auto(folder, "Model"), auto(folder), texts(2, 20)
    assert type(base).__name__ == "MegakernelModel"
    assert torch.equal(base(ids).last_hidden_state, whole.model(ids).last_hidden_state)


@torch.no_grad()
def test_the_configuration_says_whether_there_is_a_cache(folder):
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True
    ids = texts(2, 20)
    assert auto(folder)(ids).past_key_values is not None
    assert auto(folder, use_cache=False)(ids).past_key_values is None
    assert auto(folder).train()(ids).past_key_values is None


def test_keys_given_to_the_configuration_are_honoured(folder):
    model = own(folder)(own(folder, "Config").from_pretrained(folder, num_hidden_layers=1, hidden_size=16))
    assert len(model.model.layers) == 1
    assert model.model.embed_tokens.weight.shape == (64, 16)
    assert model(texts(1, 12)).logits.shape == (1, 12, 64)
    untied = auto(folder, tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    with torch.no_grad():
        first = auto(folder, num_hidden_layers=1)(texts(1, 12), output_hidden_states=True)
        whole = auto(folder)(texts(1, 12), output_hidden_states=True)
    assert torch.equal(first.hidden_states[0], whole.hidden_states[0])


REFUSED = {
    "a value that a key does not have": ({"activation": "silu"}, "'activation' expected one of .* got silu"),
    "a value of another type": ({"num_hidden_layers": "2"}, "'num_hidden_layers' expected int, got str"),
    "a size that the weights do not have": ({"hidden_size": 16}, "ignore_mismatched_sizes"),
    "heads that do not divide": (
        {"num_key_value_heads": 3},
        "num_key_value_heads=3 does not divide num_attention_heads=4",
    ),
    "a mechanism that the file lacks": (
        {"attention": {"kind": "local"}},
        "attention of kind 'local', which this file lacks",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_keys_that_contradict_the_model_are_refused(fault, folder):
    changes, text = REFUSED[fault]
    with pytest.raises((ValueError, RuntimeError, StrictDataclassError), match=text):
        auto(folder, **changes)


@torch.no_grad()
def test_lengths_of_packed_texts_may_stand_beside_position_ids(folder):
    """TRL's packing passes both."""
    model, ids = auto(folder), texts(1, 30)
    places = torch.cat([torch.arange(12), torch.arange(18)])[None]
    lengths = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 12, 30], dtype=torch.int32))
    lengths |= {"max_length_q": 18, "max_length_k": 18}
    found = model.model(ids, position_ids=places, **lengths).last_hidden_state
    assert torch.equal(found, model.model(ids, position_ids=places).last_hidden_state)
    assert not torch.equal(found, model.model(ids).last_hidden_state)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q=.* has no meaning for this model"):
        model(ids, **lengths)


def test_weights_of_attention_are_refused_by_name(folder):
    model = auto(folder)
    for asked in (model, model.model):
        with pytest.raises(ValueError, match="output_attentions=True has no meaning for this model"):
            asked(texts(1, 4), output_attentions=True)


def test_a_model_built_from_the_configuration_alone_trains(folder):
    torch.manual_seed(0)
    model = own(folder)(own(folder, "Config").from_pretrained(folder)).train()
    model.gradient_checkpointing_enable()
    optimizer, ids, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), texts(2, 30), []
    for _ in range(8):
        losses.append(model(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


def test_a_missing_weight_file_is_named_in_one_line(folder, tmp_path):
    auto(folder).save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: {lost}") as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


def test_random_frequencies_stay_in_float32_when_a_model_is_cast(tmp_path):
    model = loaded(exported(tmp_path, small_models.build(attention="performer"))).to(torch.bfloat16)
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert {x.dtype for x in model.buffers()} == {torch.float32}
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.core.projection.matrix.values"
    assert torch.equal(stored[name], model.get_buffer(name))


@torch.no_grad()
def test_a_file_takes_time_and_memory_that_grow_with_the_text_alone(tmp_path):
    """Twice the tokens save twice the bytes for backward, and not four times."""
    model = loaded(exported(tmp_path, small_models.build(attention=FLURKA))).train()

    def saved(length):
        sizes = {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kept = model(texts(1, length)).logits.sum()
        del kept
        return sum(sizes.values())

    assert saved(4096) < 2.2 * saved(2048)
