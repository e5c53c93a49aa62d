"""The configuration of a causal language model with kernelized attention."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils.versions import require_version

for _needed in ("torch>=2.11", "transformers>=5.17"):
    require_version(_needed, f"pip install -U '{_needed}'")


@strict
class MegakernelConfig(PreTrainedConfig):
    """Sizes and parts of the decoder, and the attention of its layers."""

    model_type = "megakernel"
    _auto_class: ClassVar[str | None] = "AutoConfig"  # save_pretrained saves this file, too
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention: dict[str, Any] | None = None  # mechanism of the layers: its `kind` and options
    attention_pattern: list[Any] | None = None  # mechanisms by layer, repeated; "main" is `attention`
    activation: Literal["swiglu", "geglu_tanh", "gelu", "gelu_tanh"] = "swiglu"  # the first two are gated
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_placement: Literal["before", "after", "both"] = "before"  # attention and MLP
    norm_eps: float = 1e-5
    zero_centered_norm: bool = False  # RMSNorm multiplies by 1 + weight
    qk_norm: bool = False
    qk_norm_width: Literal["head", "all"] = "head"  # RMSNorm of each head of q and k, or of all together
    qkv_bias: bool = False
    bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    position: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    max_positions: int | None = None  # rows of the table of learned positions
    rotary_base: float = 10_000.0
    rotary_share: float = 1.0  # of a head's channels
    rotary_scaling: dict[str, Any] | None = None  # `kind` and options
    rotary_pattern: list[Literal["main", "local", "none"]] | None = None  # by layer, repeated
    rotary_local: dict[str, Any] | None = None  # base and scaling of `local` layers
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None  # factor of q.k; None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0  # a divisor
    final_logit_softcapping: float | None = None  # c: logits become c tanh(logits / c)
    parallel_residual: bool = False
    normalized_residual: bool = False  # attention's output is added to its normalized input
    initializer_range: float = 0.02
    embedding_initializer_range: float | None = None  # None: initializer_range
    dropout: dict[str, float] | None = None  # that of Megakernel's training; the classes here have none
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 0  # tokens of the longest training sequence
    isolate_documents: bool = True  # a document ends after eos_token_id; later tokens do not see it
    eos_token_id: int | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any):
        names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
        self.auto_map = {auto: f"modeling_megakernel.Megakernel{name}" for auto, name in names.items()}
        kwargs.pop("auto_map", None)
        super().__post_init__(**kwargs)

    def layer_attention(self, layer: int) -> Any:
        """The mechanism of a layer, counted from 0."""
        pattern = self.attention_pattern or ["main"]
        entry = pattern[layer % len(pattern)]
        return self.attention if entry == "main" else entry

    def layer_rotary(self, layer: int) -> tuple[float, dict[str, Any]] | None:
        """Base and scaling of a layer's rotary frequencies; None: nothing is rotated."""
        pattern = self.rotary_pattern or ["main"]
        entry = pattern[layer % len(pattern)]
        if self.position != "rope" or entry == "none":
            return None
        local = self.rotary_local if entry == "local" else None
        return (local["base"], local["scaling"]) if local else (self.rotary_base, self.rotary_scaling or {})
