"""The families of dense checkpoints that are read: their sizes as our model section, their tensors as parts of ours.

A family is known by the `model_type` of its config.json. What a configuration asks of a model that ours has not is an
error with the key; nothing is left out silently. A key means what the modelling code of `transformers` makes of it:
each family says which keys that code reads, and its section sees no others, so that a key of another family that lies
in a config.json by chance is as meaningless here as there.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megakernel.config import Model, UserError

from .parts import GroupedHeads, Part, Same, Stacked

OWN = "megakernel"
"""`model_type` of what `megakernel export` writes where no family has the model's parts: our tensors as they are."""

OWN_PREFIX = "model."
"""Of their names."""

Parts = dict[str, Part]
"""Name inside a layer -> part."""


COMMON = ("model_type", "vocab_size", "tie_word_embeddings", "initializer_range")
"""Keys that every family reads."""

ONLY = {
    "is_causal": True,
    "per_layer_config": None,
    "quantization_config": None,
    "fusion_config": None,
    "transformers_weights": None,
}
"""Keys that `transformers` reads in a config.json of any family -> the one value that is read here."""


class Family(NamedTuple):
    """One `model_type`."""

    keys: tuple[str, ...]
    """Keys that change logits in `transformers`, besides `COMMON`; `section` sees these alone.

    A test shows of all others that they change none.
    """

    section: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Those keys of config.json, as `transformers` completes it -> what our model section has besides `common`."""

    around: Mapping[str, str]
    """`embedding`, `positions`, `norm.weight`, `norm.bias` and `head`, where it is untied -> their names."""

    layers: str
    """What the names of all layers begin with."""

    modules: Mapping[str, tuple[str, ...]]
    """Our names of a layer's modules -> theirs, of which several make one of ours."""

    transposed: bool = False
    """Matrices are kept the other way round, and that of queries, keys and values has all queries first."""

    ignored: tuple[str, ...] = ()
    """Ends of names that hold nothing learned."""


def model_section(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The model section of a checkpoint's configuration, with softmax attention.

    source: what errors name. Raises UserError for a family, or a key of it, that is not known here.
    """
    kind = config.get("model_type")
    if kind == OWN:
        if not isinstance(config.get("model"), dict):
            raise UserError(f"{source} has no `model`; export the run again with `megakernel export`")
        return config["model"] | {"vocab_size": config["vocab_size"]}
    if kind not in FAMILIES:
        known = ", ".join([*FAMILIES, OWN])
        raise UserError(f"{source}: model_type={kind!r} is not known; this reads {known}")
    family = FAMILIES[kind]
    try:
        for key, value in ONLY.items():
            _expect(config, key, value)
        section = family.section({key: config[key] for key in (*COMMON, *family.keys) if key in config})
    except _Unlike as error:
        raise UserError(f"{source}: {error}") from None
    common = {
        "attention": "softmax",
        "vocab_size": config["vocab_size"],
        "tie_embeddings": config["tie_word_embeddings"],
        "init_std": config["initializer_range"],
    }
    return {**common, **section}


class _Unlike(ValueError):
    """A key of config.json that the configuration has no counterpart for."""


def _expect(config: Mapping[str, Any], key: str, *allowed: Any) -> None:
    if (value := config.get(key)) not in (None, *allowed):
        choice = " or ".join(map(repr, allowed))
        raise _Unlike(f"{key}={value!r} has no counterpart here; only {choice} is read")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in config["rope_parameters"].items() if value is not None}
    if "rope_theta" not in given:
        raise _Unlike(f"rope_parameters={given} has no rope_theta; one for all layers is read")
    kind = given.get("rope_type", "default")
    section: dict[str, Any] = {"position": "rope", "rope_base": given["rope_theta"]}
    share = given.get("partial_rotary_factor", 1.0)
    if config["model_type"] == "gpt_neox":
        section |= {} if share == 1.0 else {"rotary_share": share}
    elif kind != "default":  # else the other families do not look at it
        _expect(given, "partial_rotary_factor", 1.0)
    if kind == "default":
        return section
    if kind not in _SCALED:
        raise _Unlike(f"rope_type={kind!r} has no counterpart here; linear, yarn and llama3 are read")
    if kind == "yarn":
        _expect(given, "truncate", True)
        if given.get("mscale") and given.get("mscale_all_dim"):
            raise _Unlike(
                "mscale and mscale_all_dim have no counterpart here; write their quotient as attention_factor"
            )
    scaling = {ours: given[key] for key, ours in _SCALED[kind].items() if key in given}
    return {**section, "rope_scaling": {"kind": kind, **scaling}}


_ORIGINAL = {"factor": "factor", "original_max_position_embeddings": "original_seq_len"}

_SCALED = {
    "linear": {"factor": "factor"},
    "yarn": _ORIGINAL | {key: key for key in ("beta_fast", "beta_slow", "attention_factor")},
    "llama3": _ORIGINAL | {key: key for key in ("low_freq_factor", "high_freq_factor")},
}
"""rope_type -> their keys that it reads, and ours."""


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers see all tokens, and which the last `sliding_window`."""
    window = config.get("sliding_window")
    kinds = config.get("layer_types") or ["full_attention" if window is None else "sliding_attention"]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise _Unlike(
            f"layer_types has {unknown.pop()!r}; only full_attention and sliding_attention are read"
        )
    if "sliding_attention" not in kinds:
        return {}
    if window is None:
        raise _Unlike(
            "layer_types has 'sliding_attention', and no layer has a sliding_window; set both or none"
        )
    sliding = {"attention": {"preset": "softmax", "window": window}}
    if "full_attention" not in kinds:
        return sliding
    pattern = ["main" if kind == "sliding_attention" else "softmax" for kind in kinds]
    return {**sliding, "attention_pattern": pattern}


def _llama_section(config: Mapping[str, Any]) -> dict[str, Any]:
    _expect(config, "hidden_act", "silu")
    biased = config.get("attention_bias", config["model_type"] == "qwen2")
    if config["model_type"] != "qwen2" and biased != config.get("mlp_bias", False):
        raise _Unlike(
            "attention_bias and mlp_bias differ; here the output projections have biases or have none"
        )
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or width // heads
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        **({} if head_dim * heads == width else {"head_dim": head_dim}),
        "ffn_hidden_size": config["intermediate_size"],
        "activation": "swiglu",
        "norm": "rmsnorm",
        "norm_eps": config["rms_norm_eps"],
        "qkv_bias": biased,
        "bias": biased and config["model_type"] != "qwen2",
        "qk_norm": config["model_type"] == "qwen3",
        "known_seq_len": config["max_position_embeddings"],
        **_attention(config),
        **_rope(config),
    }


def _gelu(config: Mapping[str, Any], key: str) -> str:
    _expect(config, key, "gelu", "gelu_new", "gelu_pytorch_tanh")
    return "gelu" if config[key] == "gelu" else "gelu_tanh"


def _gpt2_section(config: Mapping[str, Any]) -> dict[str, Any]:
    _expect(config, "scale_attn_weights", True)
    _expect(config, "scale_attn_by_inverse_layer_idx", False)
    _expect(config, "add_cross_attention", False)
    return {
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_heads": config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
        "activation": _gelu(config, "activation_function"),
        "norm": "layernorm",
        "norm_eps": config["layer_norm_epsilon"],
        "position": "learned",
        "max_positions": config["n_positions"],
        "bias": True,
        "qkv_bias": True,
    }


def _neox_section(config: Mapping[str, Any]) -> dict[str, Any]:
    _expect(config, "attention_bias", True)
    # A key of other families, which here turns frequencies and not the width of heads.
    _expect(config, "head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "activation": _gelu(config, "hidden_act"),
        "norm": "layernorm",
        "norm_eps": config["layer_norm_eps"],
        "bias": True,
        "qkv_bias": True,
        "parallel_residual": config["use_parallel_residual"],
        "known_seq_len": config["max_position_embeddings"],
        **_rope(config),
    }


_QKV = "self_attention.qkv"
_QK_NORMS = ("self_attention.query_norm", "self_attention.key_norm")


def layer_parts(family: Family, model: Model, index: int) -> Parts:
    """The tensors of a layer by our names."""
    parts: Parts = {}
    for ours, theirs in family.modules.items():
        if ours in _QK_NORMS and not model.qk_norm:
            continue
        other_bias = model.norm == "layernorm" if ours.endswith("norm") else model.bias
        has_bias = model.qkv_bias if ours == _QKV else other_bias
        for kind in ("weight", "bias") if has_bias else ("weight",):
            names = tuple(f"{family.layers}.{index}.{name}.{kind}" for name in theirs)
            parts[f"{ours}.{kind}"] = _part(family, model, ours, names)
    return parts


def _part(family: Family, model: Model, ours: str, names: tuple[str, ...]) -> Part:
    if ours == _QKV and (len(names) > 1 or family.transposed):
        return GroupedHeads(names, model.num_heads, model.kv_heads, model.head_size, family.transposed)
    return Same(names, family.transposed) if len(names) == 1 else Stacked(names)


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "max_position_embeddings", "rope_parameters", "head_dim"),
)


def _llama(*keys: str) -> Family:
    return Family(
        keys=(*_SIZES, "num_key_value_heads", "rms_norm_eps", *keys),
        section=_llama_section,
        around={
            "embedding": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
            "head": "lm_head.weight",
        },
        layers="model.layers",
        modules={
            "attention_norm": ("input_layernorm",),
            _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            **dict(zip(_QK_NORMS, (("self_attn.q_norm",), ("self_attn.k_norm",)))),
            "self_attention.output": ("self_attn.o_proj",),
            "mlp_norm": ("post_attention_layernorm",),
            "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.linear_fc2": ("mlp.down_proj",),
        },
        ignored=("rotary_emb.inv_freq",),
    )


FAMILIES = {
    "llama": _llama("attention_bias", "mlp_bias"),
    "mistral": _llama("sliding_window"),
    # Their configuration completes these two as use_sliding_window and max_window_layers ask for.
    "qwen2": _llama("sliding_window", "layer_types"),
    "qwen3": _llama("sliding_window", "layer_types", "attention_bias"),
    "gpt2": Family(
        keys=(
            *("n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function"),
            *("layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
            "add_cross_attention",
        ),
        section=_gpt2_section,
        around={
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
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "gpt_neox": Family(
        keys=(*_SIZES, "layer_norm_eps", "use_parallel_residual", "attention_bias"),
        section=_neox_section,
        around={
            "embedding": "gpt_neox.embed_in.weight",
            "norm.weight": "gpt_neox.final_layer_norm.weight",
            "norm.bias": "gpt_neox.final_layer_norm.bias",
            "head": "embed_out.weight",
        },
        layers="gpt_neox.layers",
        modules={
            "attention_norm": ("input_layernorm",),
            # Its rows are grouped by head, queries, keys and values, as ours are without shared keys.
            _QKV: ("attention.query_key_value",),
            "self_attention.output": ("attention.dense",),
            "mlp_norm": ("post_attention_layernorm",),
            "mlp.linear_fc1": ("mlp.dense_h_to_4h",),
            "mlp.linear_fc2": ("mlp.dense_4h_to_h",),
        },
        ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    ),
}
"""model_type -> family."""
