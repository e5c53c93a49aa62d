"""One attention layer for a model of your own; `docs/library.md` shows its use, and says what is stable.

from megakernel.layers import MultiheadAttention

layer = MultiheadAttention(512, num_heads=8, attention="flurka")
y = layer(x)                      # (B, N, 512) -> (B, N, 512), causal, linear time
y, state = layer.step(x, state)   # the same for tokens that continue earlier ones
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megakernel.checkpoint.opened import find_model
from megakernel.config import ConfigError, Model, Problem
from megakernel.config.validation import validate_section
from megakernel.model.layer import TransformerLayer
from megakernel.model.self_attention import SelfAttention
from megakernel.model.settings import ModelSettings, seeded_by
from megakernel.ops.documents import positions_from_cu_seqlens
from megakernel.parallel import OneProcess

KEYS = (
    "attention_multiplier",
    "bias",
    "init",
    "init_std",
    "max_positions",
    "norm",
    "norm_eps",
    "position",
    "qk_norm",
    "qk_norm_width",
    "qkv_bias",
    "rope_base",
    "rope_scaling",
    "rotary_share",
    "zero_centered_norm",
)
"""Keys of the configuration's `model` section that a layer's attention depends on (docs/configuration.md)."""


class StepState(NamedTuple):
    """What `MultiheadAttention.step` keeps of the tokens before: constant in size unless the mechanism caches keys."""

    tokens: int
    """How many."""

    inner: Any
    """The mechanism's state, tensors with the batch first."""


class MultiheadAttention(nn.Module):
    """Self-attention with its projections, as `megakernel pretrain` trains it from the same keys.

    Queries, keys and values are one projection; then follow what the keys name: norms of queries and keys, rotary
    embedding, short convolution, the mechanism, norm and gate of its output; then the output projection. Without a norm
    before and without a residual, like `torch.nn.MultiheadAttention`.

    Args:
        hidden_size: C, width of the input and the output.
        num_heads: query heads, H.
        attention: a preset's name (docs/mechanisms.md), `{"preset": NAME, ...changes}`, or a whole tree of
            model.attention.
        num_kv_heads: key heads, which divide H; None: H.
        head_dim: width d of a head; None: C / H.
        causal: whether a token sees itself and earlier ones alone; False needs a mechanism for encoders.
        index: the layer's place in its model, from which the noise of random features and initial weights follow.
        seed: with the index, it determines initial weights and noise, as a run's seed.
        keys: those of `KEYS`, such as rope_base=500_000.0; position="none" for no rotary embedding.

    Raises:
        ValueError: an invalid key or value, a size that does not fit, or a mechanism that cannot be causal (or must
            be); one line with key, value and remedy.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention: str | dict[str, Any] = "flurka",
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        index: int = 0,
        seed: int = 0,
        **keys: Any,
    ):
        super().__init__()
        known = [Problem(key, value, "is no key of a layer", f"choose among {', '.join(KEYS)}")
                 for key, value in keys.items() if key not in KEYS]  # fmt: skip
        if known:
            raise ConfigError(known)
        tree = keys | {"hidden_size": hidden_size, "num_heads": num_heads, "attention": attention}
        tree |= {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_layers": index + 1}
        if not causal:
            tree |= {"kind": "classifier", "classifier": {"num_classes": 1}}
        model = validate_section(Model, tree)
        with seeded_by(seed, "layer", index):
            inner = SelfAttention(ModelSettings(model, 1, OneProcess(), seed=seed), index)
        preset = attention.get("preset") if isinstance(attention, dict) else attention
        self._set(inner, model, preset)

    def _set(self, inner: SelfAttention, model: Model, preset: str | None = None) -> None:
        self.inner, self.hidden_size, self.causal = inner, model.hidden_size, model.is_causal
        self._model, self._name = model, preset or model.layer_attention(inner.index).spec.name

    @classmethod
    def from_run(cls, run: str | Path, index: int = 0, step: int | None = None) -> "MultiheadAttention":
        """Layer `index` of a run, an export or a dense model's folder, in the dtype of training and evaluation mode.

        step: of the run's checkpoint; None: the last. Raises ValueError if there is no such folder, step or layer.
        """
        source = find_model(Path(run), step)
        layers = [x for x in source.load()[0].modules() if isinstance(x, TransformerLayer)]
        if index not in range(len(layers)):
            raise ConfigError(
                [Problem("index", index, f"is no layer of {run}", f"set 0 to {len(layers) - 1}")]
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._set(layers[index].self_attention, source.config.model)
        return made.eval()

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention within the documents of each sequence.

        Args:
            x: (B, N, C).
            positions: (B, N) int64 positions within documents, which begin at 0; None: one document per sequence.
            cu_seqlens: (documents + 1,) starts of documents among the B N tokens, and B N; instead of positions.
            padding_mask: (B, N) bool, False at padding; of a bidirectional layer alone, for its keys and values.

        Returns:
            (B, N, C)

        Raises:
            ValueError: another shape, or arguments that do not go together.
        """
        batch, length = self._check(x)
        given = [
            name
            for name, value in (("positions", positions), ("cu_seqlens", cu_seqlens))
            if value is not None
        ]
        if len(given) > 1:
            raise ValueError("positions and cu_seqlens both say where documents begin; give one of them")
        if given and not self.causal:
            raise ValueError(
                f"{given[0]} is for causal layers; a bidirectional one takes one document per sequence"
            )
        if padding_mask is not None and self.causal:
            raise ValueError(
                "padding_mask is for bidirectional layers; put padding of a causal one at the end"
            )
        if cu_seqlens is not None:
            positions = positions_from_cu_seqlens(cu_seqlens, batch, length)
        if not self.causal:
            positions = torch.arange(length, device=x.device).expand(batch, length)
            if padding_mask is not None:
                positions = positions.masked_fill(~_shaped("padding_mask", padding_mask, x), -1)
        elif positions is not None:
            _shaped("positions", positions, x)
        return self._with_bias(self.inner(x.transpose(0, 1), positions))

    def step(self, x: Tensor, state: StepState | None = None) -> tuple[Tensor, StepState]:
        """`forward` of tokens (B, n, C), n >= 1, that continue those of `state`; None: they begin their sequences.

        Raises ValueError for a bidirectional layer or another shape.
        """
        if not self.causal:
            raise ValueError("step continues a sequence, and a bidirectional layer sees all of it at once")
        _, length = self._check(x)
        tokens, inner = (0, None) if state is None else state
        output, inner = self.inner.extend(x.transpose(0, 1), tokens, inner)
        return self._with_bias(output), StepState(tokens + length, inner)

    def _check(self, x: Tensor) -> tuple[int, int]:
        if x.dim() != 3 or x.shape[2] != self.hidden_size or 0 in x.shape:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (batch, tokens, {self.hidden_size})")
        return x.shape[0], x.shape[1]

    @staticmethod
    def _with_bias(output: tuple[Tensor, Tensor | None]) -> Tensor:
        heads, bias = output
        return (heads if bias is None else heads + bias).transpose(0, 1)

    def extra_repr(self) -> str:
        """Mechanism, heads, blocks and landmarks."""
        config, model = self._model.layer_attention(self.inner.index), self._model
        heads = f"{model.num_heads} heads of {model.head_size}"
        parts = [
            self._name,
            heads + ("" if model.kv_heads == model.num_heads else f" ({model.kv_heads} key heads)"),
        ]
        if config.block_size is not None:
            parts.append(f"blocks of {config.block_size}")
        if (rank := getattr(config.compression, "rank", None)) is not None:
            parts.append(f"{rank} landmarks each")
        return ", ".join([*parts, "causal" if self.causal else "bidirectional"])


def _shaped(name: str, value: Tensor, x: Tensor) -> Tensor:
    if value.shape != x.shape[:2]:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(x.shape[:2])}")
    return value
