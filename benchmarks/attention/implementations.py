"""The implementations that are measured: our ops as a model calls them, and what others offer for the same."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention import AttentionInputs, HeadShard, build
from megakernel.attention.simple_gla import SimpleGlaAttention
from megakernel.config import expand_preset
from megakernel.ops import kernel_attention
from megakernel.parallel.device import free_memory

from .cases import Case, attention_of

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q, k and v (B, H, N, d), or (B, N, H, d) for an implementation with `tokens_first`."""

FLA = "flash-linear-attention"
"""The package; its module is `fla`."""

SHARE = 0.5
"""Share of the device's free memory that an implementation may take whose memory grows with N d^2."""


@dataclass(frozen=True)
class Implementation:
    """An implementation of one attention."""

    name: str

    preset: str
    """The preset of the attention tree that it computes."""

    is_ours: bool = False
    """Ours fails the whole measurement where it is wrong; another's times are left out."""

    normalize: bool = True
    """Whether weights are divided by their sum."""

    build: Callable[[], Core] | None = None
    """Makes the function; None: the module of the preset, with the backend that the dispatcher chooses."""

    tokens_first: bool = False
    """q, k, v and the output are (B, N, H, d)."""

    needs_fla: bool = False
    """Comes with flash-linear-attention."""

    holds_states: bool = False
    """Keeps a state for every token."""

    def problem(self, case: Case, device: torch.device) -> str | None:
        """Why it does not run here, or None."""
        if self.needs_fla:
            if importlib.util.find_spec("fla") is None:
                return f"{FLA} is not installed: pip install -e '.[bench]'"
            if device.type != "cuda":
                return f"{FLA} needs a GPU"
        if self.holds_states:
            # The state of every token, its product with the value, and the gradients of both.
            taken = 4 * 4 * case.all_tokens * case.heads * case.head_dim**2
            if taken > SHARE * free_memory(device):
                return f"needs about {taken / 2**30:.0f} GiB"
        return None


def core_of(
    implementation: Implementation,
    case: Case,
    device: torch.device,
    shard: HeadShard,
    reference: torch.dtype | None,
) -> tuple[Core, list[nn.Parameter]]:
    """The function that runs, for the heads of a shard, and what it learns, in float32.

    reference: our own modules for its attention instead, with weights of this dtype.
    """
    if implementation.build is not None and reference is None:
        return implementation.build(), []
    form = attention_of(implementation.preset, case)
    if not implementation.normalize:
        return partial(kernel_attention, feature_map=form.feature_map.name, normalize=False), []
    module = build(form, num_heads=case.heads, head_dim=case.head_dim, heads=shard)
    module = module.to(device, reference or torch.float32).eval()
    return module, list(module.parameters())


def _fla(function: str, normalize: bool) -> Callable[[], Core]:
    """flash-linear-attention's linear attention behind elu + 1, which its layers apply as a pass of its own."""

    def make() -> Core:
        from fla.ops import linear_attn

        op = getattr(linear_attn, function)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return op(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=normalize)[0]

        return run

    return make


@cache
def _delta_layer(heads: int, head_dim: int) -> SimpleGlaAttention:
    return build(expand_preset("gated_deltanet"), num_heads=heads, head_dim=head_dim)


def _fla_delta() -> Core:
    """Its gated delta rule, with the decays and the strength that a layer of ours has without a projection."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decay, _ = _delta_layer(*q.shape[2:]).to(q.device).log_decay_and_step(AttentionInputs(None), k)
        log_decay = decay.mT.expand(q.shape[:3]).contiguous()
        strength = torch.full_like(log_decay, 0.5)
        return chunk_gated_delta_rule(q, k, v, log_decay, strength, use_qk_l2norm_in_kernel=True)[0]

    return run


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention as its formula reads: the state of every token by a cumulative sum."""
    phi_q, phi_k = (F.elu(x.float()) + 1 for x in (q, k))
    states = (phi_k[..., None] * v.float()[..., None, :]).cumsum(2)
    norms = phi_k.cumsum(2)
    numerator = (phi_q[..., None, :] @ states)[..., 0, :]
    return (numerator / (phi_q * norms).sum(-1, keepdim=True)).to(v.dtype)


ATTENTIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("kernel elu", "linear", is_ours=True),
        Implementation("kernel elu, not normalized", "linear", is_ours=True, normalize=False),
        Implementation("kernel hedgehog", "hedgehog", is_ours=True),
        Implementation("kernel favor", "performer", is_ours=True),
        Implementation("gated delta rule", "gated_deltanet", is_ours=True),
        Implementation("FLuRKA", "flurka", is_ours=True),
        Implementation("FLuRKA's low-rank parent", "linformer_causal", is_ours=True),
        Implementation("SDPA", "softmax"),
        *(
            Implementation(
                name if normalize else f"{name}, not normalized",
                "linear",
                normalize=normalize,
                build=_fla(f"{name.removeprefix('fla ')}_linear_attn", normalize),
                tokens_first=True,
                needs_fla=True,
            )
            for name in ("fla chunk", "fla fused_chunk")
            for normalize in (True, False)
        ),
        Implementation(
            "fla gated delta rule", "gated_deltanet", build=_fla_delta, tokens_first=True, needs_fla=True
        ),
        Implementation("eager elu", "linear", build=lambda: _eager, holds_states=True),
    )
}
"""Implementation by name. FLuRKA's kernel parent is `kernel hedgehog`, whose feature map it has."""

LAYERS = {
    preset: Implementation(preset, preset, is_ours=preset != "softmax")
    for preset in ("flurka_rnn", "flurka_performer", "linformer", "linear", "performer", "softmax")
}
"""Whole layers, by preset."""

IMPLEMENTATIONS = ATTENTIONS | LAYERS
