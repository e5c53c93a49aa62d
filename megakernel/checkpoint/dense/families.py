"""The supported families of dense checkpoints: their config.json as our model section, their tensors as ours.

The `model_type` of config.json names the family. A feature that our model lacks is an error that names its key; nothing
is ignored silently. Keys mean what the modeling code of `transformers` makes of them: each family lists the keys that
this code reads, and `section` sees only those, so a stray key of another family has no effect here, as it has none
there.
"""

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

from megakernel.config import Model, UserError

from .own import OWN, own_section
from .parts import GroupedHeads, Part

Parts = dict[str, Part]
"""Name inside a layer -> part."""


COMMON_KEYS = ("model_type", "vocab_size", "tie_word_embeddings", "initializer_range")
"""Keys that every family reads."""

SUPPORTED_VALUES = {
    "is_causal": True,
    "per_layer_config": None,
    "quantization_config": None,
    "fusion_config": None,
    "transformers_weights": None,
}
"""Keys that `transformers` reads for any family -> the only value that is supported here."""


class Family(NamedTuple):
    """One `model_type`."""

    keys: tuple[str, ...]
    """Keys that change logits in `transformers`, besides `COMMON_KEYS`; `section` sees only these and those.

    A test shows that no other key changes logits.
    """

    section: Callable[[Mapping[str, Any]], dict[str, Any]]
    """These keys of the completed config.json -> keys of our model section that are not common to all families."""

    outside_layers: Mapping[str, str]
    """`embedding`, `positions`, `norm.weight`, `norm.bias` and an untied `head` -> names in the checkpoint."""

    layers: str
    """Prefix of the names of all layers."""

    modules: Mapping[str, tuple[str, ...]]
    """Our names of a layer's modules -> the checkpoint's; several may make up one of ours."""

    transposed: bool = False
    """Matrices are stored transposed."""

    queries_first: bool = False
    """The fused QKV matrix has all queries first, then all keys, then all values."""

    ignored: tuple[str, ...] = ()
    """Suffixes of names of tensors without learned values."""

    qk_norm: bool = False
    """Queries and keys are normalized."""

    qkv_bias: bool = False
    """Only the QKV projection has biases, without a key that says so."""

    partial_rotary: bool = False
    """`partial_rotary_factor` is read with any `rope_type`."""

    rope_by_layer_type: bool = False
    """`rope_parameters` has an entry for each of the `layer_types`."""

    completed_from: tuple[str, ...] = ()
    """Further keys, from which `transformers` completes `keys`."""


def model_section(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The model section of a checkpoint's configuration, with softmax attention.

    source: the name in error messages. Raises UserError for an unknown family or an unsupported value of a key.
    """
    kind: Any = config.get("model_type")
    if kind == OWN:
        return own_section(config, source)
    if str(kind) in REFUSED:  # a damaged file may hold a list, which has no hash
        raise UserError(f"{source}: model_type={kind!r} is not read: {REFUSED[kind]}")
    if str(kind) not in FAMILIES:
        known = ", ".join([*FAMILIES, OWN])
        raise UserError(f"{source}: model_type={kind!r} is not supported; give one of {known}")
    family = FAMILIES[kind]
    try:
        for key, value in SUPPORTED_VALUES.items():
            _expect(config, key, value)
        for keys, key in product((config, config.get("rope_parameters") or {}), _DIVISORS):
            if keys.get(key) == 0:
                raise _Unsupported(f"{key}=0 is not above 0; correct it")
        section = family.section({key: config[key] for key in (*COMMON_KEYS, *family.keys) if key in config})
    except _Unsupported as error:
        raise UserError(f"{source}: {error}") from None
    common = {
        "imported": {"family": kind, "known_seq_len": section.pop("known_seq_len", None)},
        "attention": "softmax",
        "vocab_size": config["vocab_size"],
        "tie_embeddings": config["tie_word_embeddings"],
        "init_std": config["initializer_range"],
    }
    return {**common, **section}


_DROPOUT = ("attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout", "embd_pdrop")
"""Keys on dropout in the layers and of the embeddings, in any family."""


def unread_dropout(config: Mapping[str, Any]) -> str | None:
    """One line on the dropout of a checkpoint's configuration, which `model_section` leaves out; None: it has none."""
    found = ", ".join(f"{key}={config[key]}" for key in _DROPOUT if config.get(key))
    if not found or config["model_type"] == OWN:
        return None
    return f"dropout is not read ({found}): runs have none, or that of model.dropout (docs/optimization.md)"


_DIVISORS = ("num_attention_heads", "query_pre_attn_scalar", "original_max_position_embeddings")
"""Keys whose values divide others."""


class _Unsupported(ValueError):
    """A key of config.json has a value that is not supported here."""


def _expect(config: Mapping[str, Any], key: str, *allowed: Any) -> None:
    if (value := config.get(key)) not in (None, *allowed):
        choice = " or ".join(map(repr, allowed))
        raise _Unsupported(f"{key}={value!r} has no counterpart here; only {choice} is read")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of our model section on rotary frequencies, of all layers or by layer type."""
    parameters = config["rope_parameters"]
    if not FAMILIES[config["model_type"]].rope_by_layer_type:
        return {"position": "rope", **_frequencies(config, parameters)}
    _expect(parameters, "truncate", True)
    main, local = (_frequencies(config, parameters[kind]) for kind in ("full_attention", "sliding_attention"))
    section = {"position": "rope", **main}
    if local == main:
        return section
    pattern = ["local" if kind == "sliding_attention" else "main" for kind in config["layer_types"]]
    if "local" not in pattern:
        return section
    scaling = {"scaling": local["rope_scaling"]} if "rope_scaling" in local else {}
    return {**section, "rope_pattern": pattern, "local_rope": {"base": local["rope_base"], **scaling}}


def _frequencies(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {key: value for key, value in parameters.items() if value is not None}
    if "rope_theta" not in parameters:
        raise _Unsupported(f"rope_parameters={parameters} has no rope_theta; only one for all layers is read")
    if config["model_type"] == "phi3":  # its class in `transformers` refuses all others
        _expect(parameters, "rope_type", "default", "longrope")
    kind = parameters.get("rope_type", "default")
    section: dict[str, Any] = {"rope_base": parameters["rope_theta"]}
    share = parameters.get("partial_rotary_factor", 1.0)
    if FAMILIES[config["model_type"]].partial_rotary:
        section |= {} if share == 1.0 else {"rotary_share": share}
    elif kind != "default":  # with "default" the other families ignore it
        _expect(parameters, "partial_rotary_factor", 1.0)
    if kind == "default":
        return section
    if kind not in _SCALING_KEYS:
        raise _Unsupported(f"rope_type={kind!r} has no counterpart here; {', '.join(_SCALING_KEYS)} are read")
    if kind == "yarn":
        parameters = _yarn(config, parameters)
    scaling = {ours: parameters[key] for key, ours in _SCALING_KEYS[kind].items() if key in parameters}
    longest = config["max_position_embeddings"]
    if kind == "dynamic":
        scaling["original_seq_len"] = longest
    if kind == "longrope":
        scaling.setdefault("factor", max(longest / scaling["original_seq_len"], 1.0))
    return {**section, "rope_scaling": {"kind": kind, **scaling}}


def _yarn(config: Mapping[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """The keys of yarn with `mscale` and `mscale_all_dim` as the attention_factor that they stand for."""
    if FAMILIES[config["model_type"]].rope_by_layer_type:
        # `transformers` looks for it beside the layer types, not in the entry of one.
        parameters = {key: value for key, value in parameters.items() if key != "truncate"}
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if "attention_factor" in parameters or not above or not below:
        return parameters
    growth = 0.1 * math.log(max(parameters.get("factor", 1.0), 1.0))
    return parameters | {"attention_factor": (1.0 + above * growth) / (1.0 + below * growth)}


_ORIGINAL = {"factor": "factor", "original_max_position_embeddings": "original_seq_len"}

_SCALING_KEYS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": _ORIGINAL | {key: key for key in ("beta_fast", "beta_slow", "truncate", "attention_factor")},
    "llama3": _ORIGINAL | {key: key for key in ("low_freq_factor", "high_freq_factor")},
    "longrope": _ORIGINAL | {key: key for key in ("short_factor", "long_factor", "attention_factor")},
}
"""rope_type -> the keys that it reads -> our keys."""


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of our model section on attention: full or sliding-window layers, and the softcap."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or ["full_attention" if window is None else "sliding_attention"]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise _Unsupported(
            f"layer_types has {unknown.pop()!r}; only full_attention and sliding_attention are read"
        )
    cap = config.get("attn_logit_softcapping")
    full = {"preset": "softmax", **({} if cap is None else {"softcap": cap})}
    if "sliding_attention" not in kinds:
        return {} if cap is None else {"attention": full}
    if window is None:
        raise _Unsupported(
            "layer_types has 'sliding_attention', and no layer has a sliding_window; set both or none"
        )
    sliding = {"attention": {**full, "window": window}}
    if "full_attention" not in kinds:
        return sliding
    whole = "softmax" if cap is None else full
    return {
        **sliding,
        "attention_pattern": ["main" if kind == "sliding_attention" else whole for kind in kinds],
    }


def _llama_section(config: Mapping[str, Any]) -> dict[str, Any]:
    family = FAMILIES[config["model_type"]]
    activation = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    _expect(config, activation, *GATED)
    biased = config.get("attention_bias", family.qkv_bias)
    bias, mlp_bias = biased and not family.qkv_bias, config.get("mlp_bias", False)
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or width // heads
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        **({} if head_dim * heads == width else {"head_dim": head_dim}),
        "ffn_hidden_size": config["intermediate_size"],
        "activation": GATED[config[activation]],
        "norm": "rmsnorm",
        "norm_eps": config["rms_norm_eps"],
        "qkv_bias": biased,
        "bias": bias,
        **({} if mlp_bias == bias else {"mlp_bias": mlp_bias}),
        "qk_norm": family.qk_norm,
        "known_seq_len": config["max_position_embeddings"],
        **_attention(config),
        **_rope(config),
    }


GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh"}
"""Activation of a gated MLP in config.json -> ours."""


def _stablelm_section(config: Mapping[str, Any]) -> dict[str, Any]:
    # With it, attention and MLP read one norm.
    _expect(config, "use_parallel_residual", False)
    # Layer norms with weights of their own for each head.
    _expect(config, "qk_layernorm", False)
    _expect_head_dim(config)
    section = _llama_section({**config, "rms_norm_eps": config["layer_norm_eps"]})
    return section | {"norm": "layernorm", "qkv_bias": config["use_qkv_bias"]}


def _expect_head_dim(config: Mapping[str, Any]) -> None:
    """Refuse a head_dim that sets rotary frequencies and not the size of heads."""
    _expect(config, "head_dim", config["hidden_size"] // config["num_attention_heads"])


def _smollm3_section(config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = [bool(rotates) for rotates in config["no_rope_layers"]][: config["num_hidden_layers"]]
    pattern = {} if all(rotated) else {"rope_pattern": ["main" if one else "none" for one in rotated]}
    return _llama_section(config) | pattern


_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _granite_section(config: Mapping[str, Any]) -> dict[str, Any]:
    return _llama_section(config) | {key: config[key] for key in _MULTIPLIERS}


def _olmo_section(config: Mapping[str, Any]) -> dict[str, Any]:
    return _llama_section(config) | {"norm_placement": "after", "qk_norm_width": "all"}


def _gemma_section(config: Mapping[str, Any]) -> dict[str, Any]:
    _expect(config, "use_bidirectional_attention", False)
    embedding_multiplier = config["hidden_size"] ** 0.5
    return _llama_section(config) | {"zero_centered_norm": True, "embedding_multiplier": embedding_multiplier}


def _gemma2_section(config: Mapping[str, Any]) -> dict[str, Any]:
    section = _gemma_section(config) | {"norm_placement": "both"}
    if (scalar := config["query_pre_attn_scalar"]) != config["head_dim"]:
        section["attention_multiplier"] = scalar**-0.5
    if (cap := config.get("final_logit_softcapping")) is not None:
        section["final_logit_softcapping"] = cap
    return section


def _gelu(config: Mapping[str, Any], key: str) -> str:
    _expect(config, key, "gelu", "gelu_new", "gelu_pytorch_tanh")
    return "gelu" if config[key] == "gelu" else "gelu_tanh"


def _gpt2_section(config: Mapping[str, Any]) -> dict[str, Any]:
    _expect(config, "scale_attn_weights", True)
    _expect(config, "scale_attn_by_inverse_layer_idx", False)
    _expect(config, "add_cross_attention", False)
    renamed = {name: config.get(gpt2_key) for gpt2_key, name in GPT2_NAMES.items()}
    renamed["intermediate_size"] = config.get("n_inner") or 4 * config["n_embd"]
    activation = _gelu(config, "activation_function")
    return _biased_section(renamed, activation) | {
        "position": "learned",
        "max_positions": config["n_positions"],
    }


GPT2_NAMES = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""GPT-2's keys -> those of later families."""


def _neox_section(config: Mapping[str, Any]) -> dict[str, Any]:
    _expect_head_dim(config)
    biased = config["attention_bias"]  # those of the MLP and the norms are always there
    return _biased_section(config, _gelu(config, "hidden_act")) | {
        "bias": biased,
        "qkv_bias": biased,
        **({} if biased else {"mlp_bias": True}),
        "parallel_residual": config["use_parallel_residual"],
        "known_seq_len": config["max_position_embeddings"],
        **_rope(config),
    }


def _biased_section(config: Mapping[str, Any], activation: str) -> dict[str, Any]:
    """Section of the families before Llama: layer norms, and biases everywhere."""
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "activation": activation,
        "norm": "layernorm",
        "norm_eps": config["layer_norm_eps"],
        "bias": True,
        "qkv_bias": True,
    }


_QKV = "self_attention.qkv"
_QK_NORMS = ("self_attention.query_norm", "self_attention.key_norm")


def layer_parts(family: Family, model: Model, index: int) -> Parts:
    """Our names of a layer's tensors -> parts."""
    parts: Parts = {}
    for name, hf_modules in family.modules.items():
        if name in _QK_NORMS and not model.qk_norm:
            continue
        has_bias = model.norm == "layernorm" and name.endswith("norm")
        if not name.endswith("norm"):
            has_bias = model.has_mlp_bias if name.startswith("mlp.") else model.bias
        if name == _QKV:
            has_bias = model.qkv_bias
        for kind in ("weight", "bias") if has_bias else ("weight",):
            names = tuple(f"{family.layers}.{index}.{module}.{kind}" for module in hf_modules)
            parts[f"{name}.{kind}"] = _part(family, model, name, names)
    return parts


def _part(family: Family, model: Model, name: str, names: tuple[str, ...]) -> Part:
    if name == _QKV and (len(names) > 1 or family.queries_first):
        sizes = {"query_heads": model.num_heads, "kv_heads": model.kv_heads, "head_dim": model.head_size}
        return GroupedHeads(names, family.transposed, **sizes)
    return Part(names, family.transposed)


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rope_parameters", "head_dim"),
)

_NORMS_BEFORE = {"attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)}
_NORMS_AFTER = {
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
_NORMS_AROUND = _NORMS_AFTER | {
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
}


def _llama(
    *keys: str,
    section: Callable[[Mapping[str, Any]], dict[str, Any]] = _llama_section,
    activation: str = "hidden_act",
    norm_eps: str = "rms_norm_eps",
    norms: Mapping[str, tuple[str, ...]] = _NORMS_BEFORE,
    **more: Any,
) -> Family:
    """A family with Llama's tensors, except for its norms.

    keys: those that it reads besides sizes. activation: the key of the MLP's activation. norm_eps: that of its norms,
    which are layer norms if it is layer_norm_eps. more: fields of `Family`.
    """
    norm_bias = {"norm.bias": "model.norm.bias"} if norm_eps == "layer_norm_eps" else {}
    return Family(
        keys=(*_SIZES, "num_key_value_heads", norm_eps, activation, *keys),
        section=section,
        outside_layers={
            "embedding": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
            **norm_bias,
            "head": "lm_head.weight",
        },
        layers="model.layers",
        modules={
            _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            **dict(zip(_QK_NORMS, (("self_attn.q_norm",), ("self_attn.k_norm",)))),
            "self_attention.output": ("self_attn.o_proj",),
            "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.linear_fc2": ("mlp.down_proj",),
            **norms,
        },
        ignored=("rotary_emb.inv_freq",),
        **more,
    )


def _fused(family: Family) -> Family:
    """The same family with a fused QKV matrix, and a fused matrix of gate and up."""
    fused = {_QKV: ("self_attn.qkv_proj",), "mlp.linear_fc1": ("mlp.gate_up_proj",)}
    return family._replace(modules={**family.modules, **fused}, queries_first=True)


def _gemma2(*keys: str, **more: Any) -> Family:
    return _llama(
        *("sliding_window", "layer_types", "attention_bias", "query_pre_attn_scalar"),
        *("final_logit_softcapping", "use_bidirectional_attention", *keys),
        section=_gemma2_section,
        activation="hidden_activation",
        norms=_NORMS_AROUND,
        **more,
    )


_WINDOWED = ("use_sliding_window",)

FAMILIES = {
    "llama": _llama("attention_bias", "mlp_bias"),
    "mistral": _llama("sliding_window"),
    "qwen2": _llama("sliding_window", "layer_types", qkv_bias=True, completed_from=_WINDOWED),
    "qwen3": _llama(
        *("sliding_window", "layer_types", "attention_bias"), qk_norm=True, completed_from=_WINDOWED
    ),
    "smollm3": _llama(
        *("attention_bias", "mlp_bias", "sliding_window", "layer_types", "no_rope_layers"),
        section=_smollm3_section,
        completed_from=_WINDOWED,
    ),
    "granite": _llama("attention_bias", "mlp_bias", *_MULTIPLIERS, section=_granite_section),
    "olmo2": _llama("attention_bias", section=_olmo_section, norms=_NORMS_AFTER, qk_norm=True),
    "olmo3": _llama(
        *("attention_bias", "sliding_window", "layer_types"),
        section=_olmo_section,
        norms=_NORMS_AFTER,
        qk_norm=True,
        rope_by_layer_type=True,
    ),
    "phi3": _fused(
        _llama("sliding_window", partial_rotary=True, completed_from=("original_max_position_embeddings",))
    ),
    "gemma": _llama("attention_bias", "use_bidirectional_attention", section=_gemma_section),
    "gemma2": _gemma2("attn_logit_softcapping"),
    "gemma3_text": _gemma2(qk_norm=True, rope_by_layer_type=True),
    "stablelm": _llama(
        *("use_qkv_bias", "qk_layernorm", "use_parallel_residual"),
        section=_stablelm_section,
        norm_eps="layer_norm_eps",
        partial_rotary=True,
    ),
    "gpt2": Family(
        keys=(
            *GPT2_NAMES,
            *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"),
        ),
        section=_gpt2_section,
        outside_layers={
            "embedding": "transformer.wte.weight",
            "positions": "transformer.wpe.weight",
            "norm.weight": "transformer.ln_f.weight",
            "norm.bias": "transformer.ln_f.bias",
            "head": "lm_head.weight",
        },
        layers="transformer.h",
        modules={
            "attention_norm": ("ln_1",),
            _QKV: ("attn.c_attn",),
            "self_attention.output": ("attn.c_proj",),
            "mlp_norm": ("ln_2",),
            "mlp.linear_fc1": ("mlp.c_fc",),
            "mlp.linear_fc2": ("mlp.c_proj",),
        },
        transposed=True,
        queries_first=True,
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "gpt_neox": Family(
        keys=(*_SIZES, "hidden_act", "layer_norm_eps", "use_parallel_residual", "attention_bias"),
        section=_neox_section,
        outside_layers={
            "embedding": "gpt_neox.embed_in.weight",
            "norm.weight": "gpt_neox.final_layer_norm.weight",
            "norm.bias": "gpt_neox.final_layer_norm.bias",
            "head": "embed_out.weight",
        },
        layers="gpt_neox.layers",
        modules={
            "attention_norm": ("input_layernorm",),
            # Its rows are grouped by head, [query | key | value], as ours are if every head has its own key.
            _QKV: ("attention.query_key_value",),
            "self_attention.output": ("attention.dense",),
            "mlp_norm": ("post_attention_layernorm",),
            "mlp.linear_fc1": ("mlp.dense_h_to_4h",),
            "mlp.linear_fc2": ("mlp.dense_4h_to_h",),
        },
        ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
        partial_rotary=True,
    ),
}
"""model_type -> family, in the order in which `plain_config` tries them."""

_EXPERTS = (
    "its MLPs are mixtures of experts, which the model here does not have; take a dense model, "
    "see docs/dense_models.md"
)

REFUSED = {
    **dict.fromkeys(("gpt_oss", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "phimoe"), _EXPERTS),
    **dict.fromkeys(
        ("cohere", "cohere2"),
        "attention and MLP of a layer share one layer norm, which has no bias, and the model here has a norm for "
        "each; take a model of another family",
    ),
    "gemma3": "it has a vision tower; save its language model alone as gemma3_text (Gemma3ForCausalLM)",
    "olmo": "its layer norms have no weights, and those of the model here do; take OLMo 2 (olmo2)",
}
"""model_type -> why it is not supported, and what to do."""
