"""The model section: sizes, layer parts, and which attention each layer has."""

from typing import Literal

from pydantic import Field, model_validator

from .attention import Attention, AttentionField, expand_preset
from .section import Section


class Model(Section):
    """A decoder language model."""

    kind: Literal["causal_lm"] = "causal_lm"
    """What the model predicts."""

    num_layers: int = Field(gt=0)
    """Transformer layers."""

    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""

    num_heads: int = Field(gt=0)
    """Query heads."""

    num_kv_heads: int | None = Field(default=None, gt=0)
    """Key/value heads of grouped-query attention; None takes num_heads."""

    head_dim: int | None = Field(default=None, gt=0)
    """Width of one head; None takes hidden_size / num_heads."""

    ffn_hidden_size: int | None = Field(default=None, gt=0)
    """Inner width of the MLP; None takes 4 x hidden_size (gelu) or 8/3 x hidden_size rounded up to 128 (swiglu)."""

    activation: Literal["swiglu", "gelu"] = "swiglu"
    """MLP nonlinearity."""

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization before attention, before the MLP and before the head."""

    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance inside the norm."""

    position: Literal["rope", "learned", "none"] = "rope"
    """Rotary positions inside attention, a learned table added to the embedding, or neither."""

    rope_base: float = Field(default=10_000.0, gt=0)
    """Base of the rotary frequencies."""

    max_positions: int | None = Field(default=None, gt=0)
    """Rows of the learned position table; None takes training.seq_len."""

    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""

    bias: bool = False
    """Biases in the attention output and MLP projections."""

    qkv_bias: bool = False
    """Biases in the query, key and value projection."""

    vocab_size: int | None = Field(default=None, gt=0)
    """Vocabulary; None takes it from the training data's tokenizer."""

    vocab_multiple: int = Field(default=128, gt=0)
    """The embedding is padded to a multiple of this, so that it divides over tensor ranks whatever their number."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; output projections use init_std / sqrt(2 num_layers)."""

    attention: AttentionField = Field(default_factory=lambda: Attention(**expand_preset("flurka")))
    """The attention of every layer: a preset's name or a tree."""

    attention_pattern: list[Literal["main"] | AttentionField] | None = None
    """Repeated over the layers; `main` stands for model.attention. [main, main, main, softmax]: every fourth is softmax."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width d of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "gelu":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 128)) * 128

    def layer_attention(self, layer: int) -> Attention:
        """The attention of one layer, counted from 0."""
        if self.attention_pattern is None:
            return self.attention
        entry = self.attention_pattern[layer % len(self.attention_pattern)]
        return self.attention if entry == "main" else entry

    @model_validator(mode="after")
    def _sizes_divide(self) -> "Model":
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}; "
                "change one of them or set head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}; change one of them"
            )
        if self.position == "rope" and self.head_size % 2:
            raise ValueError(f"position: rope needs an even head width, not {self.head_size}; set head_dim")
        if self.attention_pattern is not None and not self.attention_pattern:
            raise ValueError("attention_pattern is empty; name at least one layer or remove it")
        return self
