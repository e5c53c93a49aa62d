"""Conversion of a model section to the config.json of a `transformers` architecture: the inverse of `families`."""

from typing import Any

from megakernel.config import Model
from megakernel.config.model import Dropout
from megakernel.config.rope import RopeScaling

from .families import FAMILIES, GATED, GPT2_NAMES, Family, model_section


def plain_config(model: Model, vocab_size: int, positions: int) -> dict[str, Any] | None:
    """config.json of a causal model; None if no known architecture has all of its parts.

    The family is the one that the weights came from, or else the first that fits: its configuration, written from the
    model and read back, computes the same function. vocab_size: without padding. positions: the longest training
    sequence; max_position_embeddings is at least that of imported weights.
    """
    # Imported here because it takes seconds.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    model = _with_plain_base(model)
    longest = max(positions, model.imported.known_seq_len or 0)
    wanted = _function(model)
    for kind in sorted(FAMILIES, key=lambda kind: kind != model.imported.family):
        candidate = {
            "architectures": [CLASSES[kind]],
            "model_type": kind,
            "vocab_size": vocab_size,
            "tie_word_embeddings": model.tie_embeddings,
            "initializer_range": model.init_std,
            "use_cache": True,
            # The family's default may lie outside of a smaller vocabulary.
            "pad_token_id": None,
            **_dropout_keys(kind, model.dropout),
            **_config_keys(kind, model, longest),
        }
        if _read_back(candidate) == wanted:
            return candidate
    return None


def _read_back(written: dict[str, Any]) -> dict[str, Any] | None:
    """The function (`_function`) that a config.json is read as; None if it is rejected."""
    try:
        return _function(Model.model_validate(model_section(written, "")))
    except ValueError:
        return None


_NON_FUNCTION_KEYS = {
    # about the vocabulary, training and sequence lengths
    *("vocab_size", "vocab_multiple", "init_std", "max_positions", "imported", "dropout"),
    *("init", "embedding_init_std"),
    # several of which can express the same function; `_function` has what they mean
    *("num_kv_heads", "head_dim", "ffn_hidden_size", "mlp_bias", "attention", "attention_pattern"),
    *("rope_base", "rope_scaling", "rope_pattern", "local_rope", "rotary_share", "attention_multiplier"),
}


def _function(model: Model) -> dict[str, Any]:
    """Canonical description of the function that a model computes."""
    layers = [(model.layer_attention(layer), model.layer_rope(layer)) for layer in range(model.num_layers)]
    return model.model_dump(exclude=_NON_FUNCTION_KEYS) | {
        "layers": layers,
        "heads": (model.kv_heads, model.head_size, model.query_scale),
        "ffn": (model.ffn_size, model.has_mlp_bias),
        "rotated": model.rotary_size if model.position == "rope" else 0,
    }


def _dropout_keys(kind: str, dropout: Dropout) -> dict[str, float]:
    """The keys of a family for dropout in the places of ours; none drops the output of attention's heads."""
    if kind == "gpt2":  # whose defaults are 0.1
        return {"resid_pdrop": dropout.residual, "embd_pdrop": dropout.embedding, "attn_pdrop": 0.0}
    if kind == "gpt_neox" and dropout.residual == dropout.embedding:
        return {"hidden_dropout": dropout.residual}
    return {"resid_pdrop": dropout.residual} if kind == "phi3" else {}


def _with_plain_base(model: Model) -> Model:
    """The same model with `ntk` scaling folded into the rotary base, and independent of sequence lengths."""
    scaling, size = model.rope_scaling, model.rotary_size
    if scaling.kind == "ntk":
        base = model.rope_base * (scaling.factor or 1.0) ** (size / (size - 2))
        return model.model_copy(update={"rope_base": base, "rope_scaling": RopeScaling()})
    return model.for_seq_len(None)


def _config_keys(kind: str, model: Model, longest: int) -> dict[str, Any]:
    """The keys that a family reads, and those from which its configuration completes them."""
    family = FAMILIES[kind]
    if model.rope_scaling.kind == "dynamic":
        longest = model.rope_scaling.original_seq_len or longest  # the length above which frequencies change
    windows = [layer.window for layer in model.attentions]
    values = {
        **_sizes(model, longest, windows),
        "rope_parameters": _rope(family, model, windows),
        "layer_norm_eps": model.norm_eps,
        "use_parallel_residual": model.parallel_residual,
    }
    if "layer_types" in family.keys and not any(windows):
        values["sliding_window"] = longest  # Gemma and OLMo build a mask from it even if no layer slides
    if kind == "gpt2":
        values |= {gpt2_key: values[name] for gpt2_key, name in GPT2_NAMES.items()}
        values["n_positions"] = model.max_positions or longest
    sources = {
        "use_sliding_window": any(windows) or None,
        "original_max_position_embeddings": model.rope_scaling.original_seq_len,
    }
    return {key: value for key, value in values.items() if key in family.keys} | {
        key: value for key, value in sources.items() if key in family.completed_from and value is not None
    }


def _sizes(model: Model, longest: int, windows: list[int | None]) -> dict[str, Any]:
    """Values by the keys of Llama and later families."""
    scale = model.query_scale * model.head_size**-0.5
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_size,
        **dict.fromkeys(("hidden_act", "hidden_activation"), _ACTIVATIONS[model.activation]),
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": longest,
        **dict.fromkeys(("attention_bias", "use_qkv_bias"), model.qkv_bias),
        "qk_layernorm": model.qk_norm,
        "mlp_bias": model.has_mlp_bias,
        "sliding_window": max((window for window in windows if window is not None), default=None),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "no_rope_layers": [int(model.layer_rope(layer) is not None) for layer in range(model.num_layers)],
        "embedding_multiplier": model.embedding_multiplier,
        "attention_multiplier": model.attention_multiplier or scale,
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": model.logits_scaling,
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": model.layer_attention(0).softcap,
        "final_logit_softcapping": model.final_logit_softcapping,
    }


_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"} | {ours: name for name, ours in GATED.items()}


def _rope(family: Family, model: Model, windows: list[int | None]) -> dict[str, Any]:
    main = _frequencies(model.rope_base, model.rope_scaling)
    if family.partial_rotary:
        return main | {"partial_rotary_factor": model.rotary_share}
    if not family.rope_by_layer_type:
        return main
    slides = next((layer for layer, window in enumerate(windows) if window), None)
    local = None if slides is None else model.layer_rope(slides)
    return {
        "full_attention": main,
        "sliding_attention": main if local is None else _frequencies(*local),
    }


def _frequencies(base: float, scaling: RopeScaling) -> dict[str, Any]:
    keys = {key: value for key, value in scaling.model_dump(mode="json").items() if value is not None}
    kind = keys.pop("kind")
    if "original_seq_len" in keys:
        keys["original_max_position_embeddings"] = keys.pop("original_seq_len")
    if kind == "dynamic":  # transformers takes it from max_position_embeddings
        del keys["original_max_position_embeddings"]
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": base, **keys}
