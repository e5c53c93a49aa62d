"""Our model section as the configuration of a plain architecture of `transformers`: the inverse of `families`."""

from collections.abc import Callable
from typing import Any

from megakernel.config import Attention, Model


def plain_config(model: Model, words: int, positions: int) -> dict[str, Any] | None:
    """config.json of a causal model, or None where no known architecture has its parts together.

    words: of the vocabulary. positions: the longest row of training; what imported weights knew before stays known.
    """
    layers = {model.layer_attention(layer) for layer in range(model.num_layers)}
    plain = {layer.model_copy(update={"window": None}) for layer in layers}
    if plain != {Attention(similarity="softmax")} or model.normalized_residual:
        return None
    for fits, config in _KINDS:
        if fits(model):
            return _common(model, words) | config(model, max(positions, model.known_seq_len or 0))
    return None


def _common(model: Model, words: int) -> dict[str, Any]:
    return {
        "vocab_size": words,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "use_cache": True,
    }


def _windows(model: Model) -> list[int | None]:
    """Of each layer."""
    return [model.layer_attention(layer).window for layer in range(model.num_layers)]


def _is_llama(model: Model) -> bool:
    parts = (model.norm, model.activation, model.position, model.rotary_share, model.parallel_residual)
    biases = (model.qkv_bias, model.bias)
    # Their biased queries and keys under a norm have biased outputs and an MLP without biases.
    known = biases == (False, False) or (not model.qk_norm and model.qkv_bias)
    windows = set(_windows(model))
    # Of these families Mistral's layers all have the same window, and Qwen's have one or none each.
    slides = len(windows - {None}) < 2 and (_llama_kind(model) != "llama" or windows == {None})
    return parts == ("rmsnorm", "swiglu", "rope", 1.0, False) and known and slides


def _llama_kind(model: Model) -> str:
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias:
        return "llama" if model.bias else "qwen2"
    return "llama" if model.bias or None in _windows(model) else "mistral"


def _llama(model: Model, positions: int) -> dict[str, Any]:
    kind, windows = _llama_kind(model), _windows(model)
    biases = {"attention_bias": model.qkv_bias} if kind in ("llama", "qwen3") else {}
    if kind == "llama":
        biases["mlp_bias"] = model.bias
    sliding: dict[str, Any] = {}
    if any(windows):
        sliding["sliding_window"] = max(window for window in windows if window is not None)
    if any(windows) and kind != "mistral":
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        sliding |= {"use_sliding_window": True, "layer_types": kinds}
    names = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    return {
        "architectures": [names[kind]],
        "model_type": kind,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.ffn_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": positions,
        "rope_parameters": _rope(model),
        **biases,
        **sliding,
    }


def _is_gpt2(model: Model) -> bool:
    parts = (model.norm, model.position, model.parallel_residual, model.qk_norm, model.bias, model.qkv_bias)
    plain = parts == ("layernorm", "learned", False, False, True, True) and not any(_windows(model))
    return plain and model.activation != "swiglu" and model.kv_heads == model.num_heads


def _gpt2(model: Model, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.ffn_size,
        "n_positions": model.max_positions or positions,
        "activation_function": _gelu(model),
        "layer_norm_epsilon": model.norm_eps,
    }


def _is_neox(model: Model) -> bool:
    parts = (model.norm, model.position, model.qk_norm, model.bias, model.qkv_bias)
    plain = parts == ("layernorm", "rope", False, True, True) and not any(_windows(model))
    return plain and model.activation != "swiglu" and model.kv_heads == model.num_heads


def _neox(model: Model, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_size,
        "hidden_act": _gelu(model),
        "layer_norm_eps": model.norm_eps,
        "max_position_embeddings": positions,
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": True,
        "rope_parameters": {**_rope(model), "partial_rotary_factor": model.rotary_share},
    }


def _gelu(model: Model) -> str:
    return "gelu" if model.activation == "gelu" else "gelu_new"


def _rope(model: Model) -> dict[str, Any]:
    scaling = model.rope_scaling
    keys = {key: value for key, value in scaling.model_dump().items() if value is not None and key != "kind"}
    if "original_seq_len" in keys:
        keys["original_max_position_embeddings"] = keys.pop("original_seq_len")
    if scaling.kind == "ntk":
        factor = scaling.factor or 1.0
        size = model.rotary_size
        return {"rope_type": "default", "rope_theta": model.rope_base * factor ** (size / (size - 2))}
    kind = "default" if scaling.kind == "none" else scaling.kind
    return {"rope_type": kind, "rope_theta": model.rope_base, **keys}


_KINDS: list[tuple[Callable[[Model], bool], Callable[[Model, int], dict[str, Any]]]] = [
    (_is_llama, _llama),
    (_is_gpt2, _gpt2),
    (_is_neox, _neox),
]
"""Whether a model is of a kind, and its configuration."""
