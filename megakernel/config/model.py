"""The model section: sizes, layer parts, and which attention each layer has."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .attention import DEFAULT_PRESET, Attention, AttentionField, expand_preset
from .errors import Problem
from .rope import RopeScaling
from .section import Section


def _main_or_tree(entry: Any) -> str:
    return "main" if entry == "main" else "tree"


LayerAttention = Annotated[
    Annotated[Literal["main"], Tag("main")] | Annotated[AttentionField, Tag("tree")],
    Discriminator(_main_or_tree),
]
"""`main` for model.attention, or a preset's name or tree of its own."""


class Classifier(Section):
    """The head of a model that assigns documents to classes, or a number to each."""

    num_classes: int = Field(ge=1, le=1_000_000)
    """Classes, as many as the prepared data has; 1: labels are numbers, and training lowers the squared error."""

    pooling: Literal["mean", "cls"] = "mean"
    """What stands for a document: the mean over its tokens, or a special token put before them."""

    head: Literal["linear", "mlp"] = "linear"
    """From there to the classes: one matrix, or a hidden layer of hidden_size with gelu."""

    documents: Literal[1, 2] = 1
    """Documents per example; of two, each read on its own, the head sees [a, b, a*b, a-b]."""


class LocalRope(Section):
    """Rotary frequencies of the layers that model.rope_pattern calls local."""

    base: float = Field(default=10_000.0, gt=1)
    """Base of their frequencies."""

    scaling: RopeScaling = RopeScaling()
    """How they are changed, whatever the sequences' length."""

    def problems(self) -> Iterator[Problem]:
        """Frequencies that go by the sequences' length."""
        if self.scaling.goes_by_length:
            remedy = "take linear, ntk, yarn or llama3, or name the layers main in rope_pattern"
            reason = "goes by the sequences' length, which model.rope_scaling alone knows"
            yield self.problem("scaling.kind", reason, remedy)


class Model(Section):
    """A transformer: a decoder, or an encoder in which every token sees every other."""

    kind: Literal["causal_lm", "masked_lm", "classifier"] = "causal_lm"
    """What the model predicts: the next token, tokens that were hidden, or the class of a document."""

    classifier: Classifier | None = None
    """The head of kind: classifier."""

    num_layers: int = Field(gt=0, le=10_000)
    """Transformer layers."""

    hidden_size: int = Field(gt=0, le=1_000_000)
    """Width of the residual stream."""

    num_heads: int = Field(gt=0, le=100_000)
    """Query heads."""

    num_kv_heads: int | None = Field(default=None, gt=0, le=100_000)
    """Key/value heads of grouped-query attention; None takes num_heads."""

    head_dim: int | None = Field(default=None, gt=0, le=100_000)
    """Width of one head; None takes hidden_size / num_heads."""

    ffn_hidden_size: int | None = Field(default=None, gt=0, le=100_000_000)
    """Inner width of the MLP; None takes 4 (gelu) or 8/3 (swiglu, rounded up to 128) x hidden_size."""

    activation: Literal["swiglu", "geglu_tanh", "gelu", "gelu_tanh"] = "swiglu"
    """MLP nonlinearity, with a gate (swiglu, geglu) or none; _tanh is gelu by a formula with tanh, as GPT-2 has it."""

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization around attention and MLP, and before the head."""

    norm_placement: Literal["before", "after", "both"] = "before"
    """Whether attention and MLP have a norm of what they read, of what they give (as OLMo 2), or both (as Gemma)."""

    zero_centered_norm: bool = False
    """A weight w of RMSNorm multiplies by 1 + w, as Gemma's and Megatron-core's layernorm_zero_centered_gamma."""

    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance inside the norm."""

    qk_norm: bool = False
    """RMSNorm of queries and keys, before positions rotate them."""

    qk_norm_width: Literal["head", "all"] = "head"
    """What qk_norm takes the mean of: the numbers of each head, or of all heads together (as OLMo 2)."""

    embedding_multiplier: float = Field(default=1.0, gt=0)
    """Token embeddings are multiplied by it, rounded to their dtype; sqrt(hidden_size) in Gemma."""

    attention_multiplier: float | None = Field(default=None, gt=0)
    """Multiplies q.k in every mechanism, through the queries; None: 1 / sqrt(head_dim)."""

    residual_multiplier: float = Field(default=1.0, gt=0)
    """Multiplies what attention and MLP add to the residual stream."""

    logits_scaling: float = Field(default=1.0, gt=0)
    """Logits are divided by it."""

    final_logit_softcapping: float | None = Field(default=None, gt=0)
    """c of c tanh(logits / c), which keeps logits within c; None: they are not capped."""

    parallel_residual: bool = False
    """The MLP reads what the attention reads, not what it has made of it."""

    normalized_residual: bool = False
    """Attention is added to its input behind the norm, as the code of *Learning the Transformer Kernel* has it."""

    position: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    """Rotary positions inside attention, a learned or a fixed table added to the embedding, or none."""

    rope_base: float = Field(default=10_000.0, gt=1)
    """Base of the rotary frequencies."""

    rotary_share: float = Field(default=1.0, gt=0, le=1)
    """Share of a head's width, from its first number on, that positions rotate."""

    rope_scaling: RopeScaling = RopeScaling()
    """How they are changed for sequences longer than those learned from."""

    rope_pattern: Annotated[list[Literal["main", "local", "none"]], Field(min_length=1)] | None = None
    """Repeated over the layers: rotated by rope_base and rope_scaling (main), by local_rope (local), or not at all."""

    local_rope: LocalRope | None = None
    """Frequencies of layers that rope_pattern calls local, such as those with windows."""

    known_seq_len: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Tokens of the longest sequences that imported weights have learned from; plain exports name no fewer."""

    family: str | None = None
    """model_type of the checkpoint that was imported, to which plain exports go back where its parts still fit."""

    max_positions: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Rows of the learned position table, and columns of linformer's E and F; None takes training.seq_len."""

    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""

    bias: bool = False
    """Biases in the attention output and MLP projections."""

    mlp_bias: bool | None = None
    """Biases in the MLP projections; None takes bias."""

    qkv_bias: bool = False
    """Biases in the query, key and value projection."""

    vocab_size: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Vocabulary; None takes it from the training data's tokenizer."""

    vocab_multiple: int = Field(default=128, gt=0, le=1_000_000)
    """Rows of the embedding are padded to a multiple of this, so that tensor ranks share them; padding never counts."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; output projections use init_std / sqrt(2 num_layers)."""

    attention: AttentionField = Field(default_factory=lambda: Attention(**expand_preset(DEFAULT_PRESET)))
    """The attention of every layer: a preset's name or a tree."""

    attention_pattern: Annotated[list[LayerAttention], Field(min_length=1)] | None = None
    """Repeated over the layers; `main` is model.attention. [main, main, softmax]: every third is softmax."""

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only itself and what came before."""
        return self.kind == "causal_lm"

    @property
    def special_ids(self) -> int:
        """Ids behind the tokenizer's that encoders know: the mask, then the token that stands for a document.

        All encoders have both, so that a classifier can start from the weights of a masked language model.
        """
        return 0 if self.is_causal else 2

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Padded vocabulary size: rows of the embedding, of which those behind the vocabulary stand for nothing."""
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def counts_positions(self) -> bool:
        """Whether parameters count the places of a sequence: a learned position table, or linformer's E and F."""
        return self.position == "learned" or any(layer.counts_positions for layer in self.attentions)

    @property
    def is_gated(self) -> bool:
        """Whether a layer has a gate between its near window and its far part."""
        return any(layer.spec.is_gated for layer in self.attentions)

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of tokens that one sample of training fills."""
        return self.classifier.documents if self.classifier is not None else 1

    @property
    def measures(self) -> tuple[str, ...]:
        """What the head measures outside training, as shares of means over the global batch."""
        has_classes = self.classifier is not None and self.classifier.num_classes > 1
        return ("loss", "accuracy") if has_classes else ("loss",)

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width d of one head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def rotary_size(self) -> int:
        """Numbers of a head that positions rotate."""
        return int(self.head_size * self.rotary_share)

    @property
    def is_mlp_gated(self) -> bool:
        """Whether the MLP has a gate beside what it gates."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def first_layer(self) -> int:
        """Number of the first transformer layer among the modules: after the embedding and positions that are added."""
        return 2 if self.position in ("learned", "sinusoidal") else 1

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the MLP's projections have biases."""
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by before a mechanism that divides q.k by sqrt(head_dim)."""
        return 1.0 if self.attention_multiplier is None else self.attention_multiplier * self.head_size**0.5

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if not self.is_mlp_gated:
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 128)) * 128

    def layer_attention(self, layer: int) -> Attention:
        """The attention of one layer, counted from 0."""
        if self.attention_pattern is None:
            return self.attention
        entry = self.attention_pattern[layer % len(self.attention_pattern)]
        return self.attention if entry == "main" else entry

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [self.layer_attention(layer) for layer in range(self.num_layers)]

    def for_rows(self, seq_len: int | None) -> "Model":
        """The model with the rotary frequencies of sequences of so many tokens, where they go by that."""
        return self.model_copy(update={"rope_scaling": self.rope_scaling.for_rows(seq_len)})

    def layer_rope(self, layer: int) -> tuple[float, RopeScaling] | None:
        """Base and scaling of the frequencies that rotate a layer, counted from 0; None: positions do not."""
        if self.position != "rope":
            return None
        entry = "main" if self.rope_pattern is None else self.rope_pattern[layer % len(self.rope_pattern)]
        if entry == "local" and self.local_rope is not None:
            return self.local_rope.base, self.local_rope.scaling
        return None if entry == "none" else (self.rope_base, self.rope_scaling)

    def problems(self) -> Iterator[Problem]:
        """Head counts and widths that do not fit each other, and keys of another kind of model."""
        if self.kind == "classifier" and self.classifier is None:
            remedy = "add classifier: {num_classes: 2}, or as many as the data has"
            yield self.problem("classifier", "is missing beside kind: classifier", remedy)
        yield from self.without_effect("kind", {"classifier": ("classifier",)})
        if self.head_dim is None and self.hidden_size % self.num_heads:
            reason = f"is not a multiple of num_heads={self.num_heads}"
            yield self.problem("hidden_size", reason, "change one of them or set head_dim")
        if self.num_heads % self.kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            reason, choice = f"does not divide num_heads={self.num_heads}", ", ".join(map(str, divisors))
            yield Problem("num_kv_heads", self.kv_heads, reason, f"choose one of {choice}")
        takers = dict.fromkeys(("rope_scaling", "rotary_share", "rope_pattern"), ("rope",))
        yield from self.without_effect("position", takers)
        yield from self._rope_problems()
        yield from self._norm_problems()
        if self.position == "rope" and self.rotary_size % 2:
            reason = f"rotates pairs, and {self.rotary_size} numbers of a head are to be rotated"
            yield self.problem("position", reason, "set an even head_dim and rotary_share x head_dim")
        if self.normalized_residual and self.parallel_residual:
            reason = "leaves no unnormalized input for parallel_residual"
            yield self.problem("normalized_residual", reason, "remove one of them")
        if self.max_positions is not None and not self.counts_positions:
            reason = f"has no effect on position: {self.position}"
            yield self.problem("max_positions", reason, "remove it or take position: learned")
        for key in ("qkv_bias", "qk_norm"):
            if getattr(self, key) and any(layer.compresses_input for layer in self.attentions):
                reason = "cannot stand behind E and F, which act on the input before its projections"
                yield self.problem(key, reason, "remove it or set compression.compress: projected")
        maps = dict.fromkeys(layer.feature_map for layer in self.attentions)
        for feature_map in maps:
            for problem in feature_map.problems_at(self.head_size) if feature_map is not None else ():
                yield problem.under("attention.feature_map")

    def _rope_problems(self) -> Iterator[Problem]:
        layers = enumerate(self.attentions)
        if any(self.layer_rope(index) is None and layer.far_rope != "none" for index, layer in layers):
            key, reason = "position", "leaves far_rope nothing to rotate with"
            remedy = "set far_rope: none or take position: rope"
            if self.position == "rope":
                key, remedy = "rope_pattern", "set far_rope: none in layers that are not rotated"
            yield self.problem(key, reason, remedy)
        named = self.rope_pattern is not None and "local" in self.rope_pattern
        if named and self.local_rope is None:
            yield self.problem("local_rope", "is missing beside local in rope_pattern", "add its base")
        if self.local_rope is not None and not named:
            remedy = "remove it or name layers local in rope_pattern"
            yield self.problem("local_rope", "has no layer in rope_pattern", remedy)
        local = None if self.local_rope is None else self.local_rope.scaling
        for key, scaling in (("rope_scaling", self.rope_scaling), ("local_rope.scaling", local)):
            problem = None if scaling is None else scaling.pairs_problem(self.rotary_size // 2)
            if problem is not None:
                yield problem.under(key)

    def _norm_problems(self) -> Iterator[Problem]:
        if self.normalized_residual and self.norm_placement == "after":
            reason = "needs a norm before attention, and norm_placement is after"
            yield self.problem("normalized_residual", reason, "remove it or take norm_placement: both")
        yield from self.without_effect("norm", {"zero_centered_norm": ("rmsnorm",)})
        if self.qk_norm_width != "head" and not self.qk_norm:
            reason = "has no effect without qk_norm"
            yield self.problem("qk_norm_width", reason, "remove it or set qk_norm: true")
        if self.classifier is not None and (self.logits_scaling != 1 or self.final_logit_softcapping):
            key = "logits_scaling" if self.logits_scaling != 1 else "final_logit_softcapping"
            reason = "is of a vocabulary's logits, and the model is a classifier"
            yield self.problem(key, reason, "remove it")
