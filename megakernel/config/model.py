"""The model section: sizes, parts of a layer, and the attention of each layer."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .attention import DEFAULT_PRESET, Attention, AttentionField, expand_preset
from .errors import MISSING, Problem
from .rope import RopeScaling
from .section import Section


def _main_or_tree(entry: Any) -> str:
    return "main" if entry == "main" else "tree"


LayerAttention = Annotated[
    Annotated[Literal["main"], Tag("main")] | Annotated[AttentionField, Tag("tree")],
    Discriminator(_main_or_tree),
]
"""`main` for model.attention, or another preset name or tree."""


class Classifier(Section):
    """Head of a model that classifies documents or predicts a number for each."""

    num_classes: int = Field(ge=1, le=1_000_000)
    """Classes, as many as in the prepared data; 1: regression, numeric labels with the squared error as loss."""

    pooling: Literal["mean", "cls"] = "mean"
    """Representation of a document: `mean` over its tokens, or `cls`: a special token prepended to them."""

    head: Literal["linear", "mlp"] = "linear"
    """From that to the logits: one matrix, or an MLP with one hidden layer of hidden_size and gelu."""

    documents: Literal[1, 2] = 1
    """Documents per example. Two (a sentence pair) are encoded separately, and the head sees [a, b, a*b, a-b]."""


class EncoderStack(Section):
    """Encoder of a model that translates: it reads the source, and every layer of the decoder attends to it."""

    num_layers: int = Field(gt=0, le=10_000)
    """Its transformer layers, of the decoder's sizes; model.num_layers are those of the decoder."""

    attention: AttentionField = Field(default_factory=lambda: Attention(**expand_preset("softmax")))
    """Attention of its layers, whose tokens see each other: a preset name, `{preset: NAME, ...changes}` or a tree."""

    cross_attention: AttentionField = Field(default_factory=lambda: Attention(**expand_preset("softmax")))
    """Attention of the decoder's tokens to the source: softmax, or kernel attention, whose sums over the source are
    made once."""

    def problems(self) -> Iterator[Problem]:
        """Mechanisms that need one order of queries and keys, and parts around them."""
        cross = self.cross_attention
        remedy = "take softmax, linear, performer, hedgehog or another kernel without compression"
        if not cross.spec.reads_other_keys:
            reason = "does not suit cross attention: it needs queries and keys of the same tokens"
            yield Problem("cross_attention", MISSING, reason, remedy)
        for part in cross.optional_parts:
            reason = "stands around self-attention, and cross attention has none"
            yield self.problem(f"cross_attention.{part}", reason, "remove it")


class LocalRope(Section):
    """Rotary frequencies of the `local` layers of model.rope_pattern."""

    base: float = Field(default=10_000.0, gt=1)
    """Base (theta) of their rotary frequencies."""

    scaling: RopeScaling = RopeScaling()
    """Scaling of their rotary frequencies; kinds that depend on sequence length are refused."""

    def problems(self) -> Iterator[Problem]:
        """A scaling that depends on sequence length."""
        if self.scaling.depends_on_length:
            remedy = "take linear, ntk, yarn or llama3, or name the layers main in rope_pattern"
            reason = "depends on sequence length, which only model.rope_scaling supports"
            yield self.problem("scaling.kind", reason, remedy)


class Dropout(Section):
    """Dropout in training: a function of run.seed, step, token, layer and place, whatever the layout or restarts."""

    attention: float = Field(default=0.0, ge=0, lt=1)
    """Of the output of each mechanism, before its output projection; attention weights are not dropped."""

    residual: float = Field(default=0.0, ge=0, lt=1)
    """Of what attention and MLP add to the residual stream."""

    embedding: float = Field(default=0.0, ge=0, lt=1)
    """Of the embeddings of tokens and positions, after their sum."""

    @property
    def any(self) -> bool:
        """Whether anything is dropped."""
        return bool(self.attention or self.residual or self.embedding)


class Imported(Section):
    """What `import` records of the checkpoint that a model's weights came from."""

    is_internal = True

    known_seq_len: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Longest sequence, in tokens, that the weights support; plain exports state at least this."""

    family: str | None = None
    """model_type of the checkpoint; plain exports prefer it if the model still fits."""


class Model(Section):
    """A transformer: a causal decoder, a bidirectional encoder, or both, one reading the other."""

    kind: Literal["causal_lm", "masked_lm", "classifier", "encoder_decoder"] = "causal_lm"
    """What the model predicts: the next token (decoder), masked tokens or the class of a document (encoders), or a
    text's translation (encoder_decoder)."""

    classifier: Classifier | None = None
    """Head of kind: classifier, which requires it."""

    encoder: EncoderStack | None = None
    """Encoder of kind: encoder_decoder, which requires it; the other keys describe the decoder, and sizes both."""

    num_layers: int = Field(gt=0, le=10_000)
    """Transformer layers."""

    hidden_size: int = Field(gt=0, le=1_000_000)
    """Width of the residual stream."""

    num_heads: int = Field(gt=0, le=100_000)
    """Query heads."""

    num_kv_heads: int | None = Field(default=None, gt=0, le=100_000)
    """Key/value heads of grouped-query attention; None: num_heads."""

    head_dim: int | None = Field(default=None, gt=0, le=100_000)
    """Width of one head; None: hidden_size / num_heads."""

    ffn_hidden_size: int | None = Field(default=None, gt=0, le=100_000_000)
    """Inner width of the MLP; None: 4 x hidden_size, with a gated activation 8/3 x, rounded up to a multiple of 128."""

    activation: Literal["swiglu", "geglu_tanh", "gelu", "gelu_tanh"] = "swiglu"
    """MLP activation; swiglu and geglu are gated, `_tanh` is the tanh approximation of gelu, as in GPT-2."""

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalization around attention and MLP, and before the head."""

    norm_placement: Literal["before", "after", "both"] = "before"
    """Normalize the inputs of attention and MLP (pre-norm), their outputs (as OLMo 2), or both (as Gemma)."""

    zero_centered_norm: bool = False
    """RMSNorm multiplies by 1 + w instead of w, as in Gemma and Megatron-core's layernorm_zero_centered_gamma."""

    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance inside the norm."""

    qk_norm: bool = False
    """RMSNorm of queries and keys, before rotary embedding."""

    qk_norm_width: Literal["head", "all"] = "head"
    """qk_norm normalizes each `head` separately, or `all` heads together (as OLMo 2)."""

    embedding_multiplier: float = Field(default=1.0, gt=0)
    """Multiplies token embeddings, itself first rounded to their dtype; sqrt(hidden_size) in Gemma."""

    attention_multiplier: float | None = Field(default=None, gt=0)
    """Factor of q.k in every mechanism, applied to the queries; None: 1 / sqrt(head_dim)."""

    residual_multiplier: float = Field(default=1.0, gt=0)
    """Multiplies the outputs of attention and MLP before they are added to the residual stream."""

    logits_scaling: float = Field(default=1.0, gt=0)
    """Logits are divided by it."""

    final_logit_softcapping: float | None = Field(default=None, gt=0)
    """Caps logits to c tanh(logits / c); this is c. None: no cap."""

    parallel_residual: bool = False
    """Attention and MLP both read the layer's input, in parallel, instead of one after the other."""

    normalized_residual: bool = False
    """Add attention's output to its normalized input, as the code of *Learning the Transformer Kernel* does."""

    position: Literal["rope", "learned", "sinusoidal", "none"] = "rope"
    """Positions: rotary embedding of q and k, a learned or sinusoidal table added to the embedding, or none."""

    rope_base: float = Field(default=10_000.0, gt=1)
    """Base (theta) of the rotary frequencies."""

    rotary_share: float = Field(default=1.0, gt=0, le=1)
    """Share of a head's width that is rotated, from its first channel on (partial rotary factor)."""

    rope_scaling: RopeScaling = RopeScaling()
    """Scaling of the rotary frequencies for sequences longer than the weights were trained on."""

    rope_pattern: Annotated[list[Literal["main", "local", "none"]], Field(min_length=1)] | None = None
    """Repeated over the layers: `main` rotates by rope_base and rope_scaling, `local` by local_rope, `none` not at
    all; None: all `main`."""

    local_rope: LocalRope | None = None
    """Rotary frequencies of the `local` layers of rope_pattern, such as sliding-window layers."""

    max_positions: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Rows of the learned position table and columns of linformer's E and F; None: training.seq_len."""

    dropout: Dropout = Dropout()
    """Probabilities with which training sets numbers to 0, and divides the others by the rest."""

    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""

    bias: bool = False
    """Biases in the attention output and MLP projections."""

    mlp_bias: bool | None = None
    """Biases in the MLP projections; None: as `bias`."""

    qkv_bias: bool = False
    """Biases in the query, key and value projections; where E and F compress the input, added after that."""

    vocab_size: int | None = Field(default=None, gt=0, le=1_000_000_000)
    """Vocabulary size; None: that of the training data's tokenizer."""

    vocab_multiple: int = Field(default=128, gt=0, le=1_000_000)
    """The embedding is padded to a multiple of this many rows, so that tensor ranks can split it; padding gets no
    probability."""

    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; output projections use init_std / sqrt(2 num_layers)."""

    init: Literal["normal", "uniform", "xavier"] = "normal"
    """Initial matrices: `normal` with init_std; `uniform` within 1 / sqrt(inputs), biases too, the default of PyTorch's
    linear layers; `xavier`: uniform within sqrt(6 / (inputs + outputs)). The last two ignore init_std."""

    embedding_init_std: float | None = Field(default=None, gt=0)
    """Standard deviation of initial embeddings of tokens and positions; None: init_std."""

    attention: AttentionField = Field(default_factory=lambda: Attention(**expand_preset(DEFAULT_PRESET)))
    """Attention of every layer: a preset name, `{preset: NAME, ...changes}` or a whole tree."""

    attention_pattern: Annotated[list[LayerAttention], Field(min_length=1)] | None = None
    """Attention by layer, repeated over the layers; `main` is model.attention. [main, main, softmax]: every third
    layer is softmax."""

    imported: Imported = Imported()
    """What is known of imported weights."""

    moved = (("known_seq_len", "imported"), ("family", "imported"))

    @property
    def is_causal(self) -> bool:
        """Whether tokens see only themselves and earlier ones."""
        return self.kind == "causal_lm"

    @property
    def special_ids(self) -> int:
        """Token ids that encoders add after the tokenizer's: mask, then CLS.

        All encoders have both, so that a classifier can start from the weights of a masked language model.
        """
        return 2 if self.kind in ("masked_lm", "classifier") else 0

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Rows of the embedding: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def has_position_parameters(self) -> bool:
        """Whether the model has parameters per position: a learned position table, or linformer's E and F."""
        return self.position == "learned" or any(layer.has_position_parameters for layer in self.attentions)

    @property
    def is_gated(self) -> bool:
        """Whether a layer has a gate between near window and far context."""
        return any(layer.spec.is_gated for layer in self.attentions)

    @property
    def sequences_per_sample(self) -> int:
        """Token sequences per training sample; an encoder-decoder's are a source and a target."""
        if self.encoder is not None:
            return 2
        return self.classifier.documents if self.classifier is not None else 1

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the head's evaluation metrics, each a mean over the global batch."""
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
        """Rotated channels of a head."""
        return int(self.head_size * self.rotary_share)

    @property
    def is_mlp_gated(self) -> bool:
        """Whether the MLP's activation is gated."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def first_layer(self) -> int:
        """Index of the first transformer layer among the modules: after the embedding and an added position table."""
        return 2 if self.position in ("learned", "sinusoidal") else 1

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the MLP's projections have biases."""
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def embedding_std(self) -> float:
        """Standard deviation of initial embeddings."""
        return self.init_std if self.embedding_init_std is None else self.embedding_init_std

    @property
    def query_scale(self) -> float:
        """Factor of the queries before a mechanism that divides q.k by sqrt(head_dim)."""
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
        """The self-attention of one layer, counted from 0; an encoder's layers come before its decoder's."""
        if self.encoder is not None and layer < self.encoder.num_layers:
            return self.encoder.attention
        if self.attention_pattern is None:
            return self.attention
        entry = self.attention_pattern[(layer - self.encoder_layers) % len(self.attention_pattern)]
        return self.attention if entry == "main" else entry

    def is_causal_layer(self, layer: int) -> bool:
        """Whether tokens of a layer see only themselves and earlier ones."""
        return self.is_causal or (self.encoder is not None and layer >= self.encoder_layers)

    @property
    def encoder_layers(self) -> int:
        """Layers of the encoder of an encoder-decoder; 0 for other models, whose layers are all of one kind."""
        return 0 if self.encoder is None else self.encoder.num_layers

    @property
    def all_layers(self) -> int:
        """Transformer layers, those of the encoder of an encoder-decoder included."""
        return self.encoder_layers + self.num_layers

    @property
    def attentions(self) -> list[Attention]:
        """The self-attention of each layer."""
        return [self.layer_attention(layer) for layer in range(self.all_layers)]

    @property
    def mechanisms(self) -> list[Attention]:
        """`attentions`, and the cross attention of an encoder-decoder."""
        return self.attentions + ([] if self.encoder is None else [self.encoder.cross_attention])

    def for_seq_len(self, seq_len: int | None) -> "Model":
        """The model for sequences of `seq_len` tokens, if its rotary frequencies depend on that."""
        return self.model_copy(update={"rope_scaling": self.rope_scaling.for_seq_len(seq_len)})

    def layer_rope(self, layer: int) -> tuple[float, RopeScaling] | None:
        """Base and scaling of the rotary frequencies of a layer, counted from 0; None: no rotary embedding."""
        if self.position != "rope":
            return None
        if self.rope_pattern is None or layer < self.encoder_layers:
            return self.rope_base, self.rope_scaling
        entry = self.rope_pattern[(layer - self.encoder_layers) % len(self.rope_pattern)]
        if entry == "local" and self.local_rope is not None:
            return self.local_rope.base, self.local_rope.scaling
        return None if entry == "none" else (self.rope_base, self.rope_scaling)

    def problems(self) -> Iterator[Problem]:
        """Sizes that do not fit together, and keys without effect on this model."""
        if self.kind == "classifier" and self.classifier is None:
            remedy = "add classifier: {num_classes: 2}, or as many as the data has"
            yield self.problem("classifier", "is missing beside kind: classifier", remedy)
        if self.kind == "encoder_decoder" and self.encoder is None:
            remedy = "add encoder: {num_layers: 2}, or as many as the decoder has"
            yield self.problem("encoder", "is missing beside kind: encoder_decoder", remedy)
        used_by = {"classifier": ("classifier",), "encoder": ("encoder_decoder",)}
        yield from self.without_effect("kind", used_by)
        if self.encoder is not None:
            yield from self._encoder_problems()
        if self.head_dim is None and self.hidden_size % self.num_heads:
            reason = f"is not a multiple of num_heads={self.num_heads}"
            yield self.problem("hidden_size", reason, "change one of them or set head_dim")
        if self.num_heads % self.kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            reason, choice = f"does not divide num_heads={self.num_heads}", ", ".join(map(str, divisors))
            yield Problem("num_kv_heads", self.kv_heads, reason, f"choose one of {choice}")
        used_by = dict.fromkeys(("rope_base", "rope_scaling", "rotary_share", "rope_pattern"), ("rope",))
        yield from self.without_effect("position", used_by)
        yield from self._rope_problems()
        yield from self._norm_problems()
        if self.position == "rope" and self.rotary_size % 2:
            reason = f"rotates pairs of channels, and {self.rotary_size} channels of a head are to be rotated"
            yield self.problem("position", reason, "set an even head_dim and rotary_share x head_dim")
        if self.normalized_residual and self.parallel_residual:
            reason = "leaves no unnormalized input for parallel_residual"
            yield self.problem("normalized_residual", reason, "remove one of them")
        if self.max_positions is not None and not self.has_position_parameters:
            reason = f"has no effect on position: {self.position}"
            yield self.problem("max_positions", reason, "remove it or take position: learned")
        for key in ("attention_pattern", "rope_pattern"):
            if len(pattern := getattr(self, key) or ()) > self.num_layers:
                reason = f"has {len(pattern)} entries for num_layers={self.num_layers}, so the last are of no layer"
                yield self.problem(key, reason, "leave them out, or raise num_layers")
        if self.qk_norm and any(layer.compresses_input for layer in self.attentions):
            reason = "is not supported with E and F that compress the input before its projections"
            yield self.problem("qk_norm", reason, "remove it or set compression.compress: projected")
        maps = dict.fromkeys(layer.feature_map for layer in self.attentions)
        for feature_map in maps:
            for problem in feature_map.problems_at(self.head_size) if feature_map is not None else ():
                yield problem.under("attention.feature_map")

    def _encoder_problems(self) -> Iterator[Problem]:
        for key in ("parallel_residual", "normalized_residual"):
            if getattr(self, key):
                reason = "says nothing of cross attention, which stands between self-attention and MLP"
                yield self.problem(key, reason, "remove it")
        assert self.encoder is not None
        feature_map = self.encoder.cross_attention.feature_map
        for problem in feature_map.problems_at(self.head_size) if feature_map is not None else ():
            yield problem.under("encoder.cross_attention.feature_map")

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
            reason = "applies to logits of a vocabulary, and the model is a classifier"
            yield self.problem(key, reason, "remove it")
