"""Tiny models of `transformers` with random weights, one for each feature in which families differ."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
)

LENGTH = 64
VOCABULARY = 384

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 500.0, **keys}


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "llama, biases, tied, scaled": LlamaConfig(
        **_GROUPED,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral, wide heads": MistralConfig(**_GROUPED, head_dim=16, sliding_window=None),
    "mistral, sliding": MistralConfig(**_GROUPED, sliding_window=8),
    "qwen2, some layers slide": Qwen2Config(
        **_GROUPED,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "qwen2, yarn": Qwen2Config(
        **_GROUPED, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "qwen2, yarn between pairs": Qwen2Config(
        **_GROUPED,
        rope_parameters=_rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, beta_slow=0.25, truncate=False
        ),
    ),
    "qwen3, tied": Qwen3Config(**_GROUPED, head_dim=16, tie_word_embeddings=True),
    "llama, biases of attention, dynamic": LlamaConfig(
        **_GROUPED | {"max_position_embeddings": 40},
        attention_bias=True,
        rope_parameters=_rope("dynamic", factor=2.0),
    ),
    "qwen3, biases": Qwen3Config(**_GROUPED, head_dim=16, attention_bias=True),
    "smollm3": SmolLM3Config(
        **_GROUPED, pad_token_id=0, no_rope_layers=[1, 0], attention_bias=True, tie_word_embeddings=True
    ),
    "granite": GraniteConfig(
        **_GROUPED,
        mlp_bias=True,
        embedding_multiplier=12.0,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "olmo2": Olmo2Config(**_GROUPED, attention_bias=True),
    "olmo3, some layers slide": Olmo3Config(
        **_GROUPED,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": _rope("default"),
            "full_attention": _rope("yarn", factor=4.0, original_max_position_embeddings=16),
        },
    ),
    "phi3, sliding": Phi3Config(**_GROUPED, **_SPECIAL, sliding_window=8),
    "phi3, partly rotated, longrope": Phi3Config(
        **_GROUPED,
        **_SPECIAL,
        original_max_position_embeddings=16,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0, 1.5],
            long_factor=[1.5, 4.0],
            factor=4.0,
            original_max_position_embeddings=16,
            partial_rotary_factor=0.5,
        ),
    ),
    "gemma": GemmaConfig(**_GROUPED, head_dim=16),
    "gemma2": Gemma2Config(
        **_GROUPED,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_GROUPED,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
        rope_parameters={
            "sliding_attention": _rope("default"),
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
    ),
    # An odd vocabulary size, as that of GPT-2.
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY + 3, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, initializer_range=0.2
    ),
    "gpt_neox": GPTNeoXConfig(**_SIZES),
    "gpt_neox, one after the other": GPTNeoXConfig(
        **_SIZES,
        use_parallel_residual=False,
        rope_parameters=_rope("linear", factor=2.0, partial_rotary_factor=0.5),
    ),
    "gpt_neox, no biases of attention": GPTNeoXConfig(**_SIZES, attention_bias=False),
    "stablelm": StableLmConfig(**_GROUPED),
    "stablelm, biases of queries, keys and values": StableLmConfig(
        **_GROUPED, use_qkv_bias=True, rope_parameters=_rope("linear", factor=2.0, partial_rotary_factor=0.5)
    ),
}


def dense_model(name: str) -> Any:
    """The model with seeded random weights; norms and biases differ from their initial values."""
    torch.manual_seed(0)
    # A copy, because a model writes its dtype into its configuration.
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            # The embedding of the padding token is 0, which an update of any size would change.
            parameter.masked_fill_(parameter == 0, 0.1)
    return model


def save(name: str, folder: Path, **options: Any) -> Any:
    """Write the checkpoint, and return the model."""
    model = dense_model(name)
    model.save_pretrained(folder, **options)
    return model


def tokens() -> torch.Tensor:
    """A sequence (1, LENGTH), the same at every call."""
    return torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
