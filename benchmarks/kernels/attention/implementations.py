"""The measured implementations: our ops as a model calls them, and other libraries' implementations of the same."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention import AttentionInputs, AttentionLayer, HeadShard, build
from megakernel.config.extras import install
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.parallel.device import free_memory

from .cases import Case, attention_of

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q, k and v (B, H, N, d), or (B, N, H, d) for an implementation with `tokens_first`."""

FLA = "flash-linear-attention"
"""Name of the package; its module is `fla`."""

SELECTED = "selected blocks"
"""Name of the implementation without kernels."""

MEMORY_SHARE = 0.5
"""Largest share of the device's free memory for an implementation with `holds_states`."""


@dataclass(frozen=True)
class Implementation:
    """An implementation of one attention."""

    name: str

    preset: str
    """The preset of the attention that it computes."""

    is_ours: bool = False
    """If one of ours is wrong, the whole measurement fails; another's times are left out."""

    normalize: bool = True
    """Whether weights are divided by their sum."""

    build: Callable[[], Core] | None = None
    """Makes the function; None: the preset's module, with the backend that the dispatcher chooses."""

    tokens_first: bool = False
    """q, k, v and the output are (B, N, H, d)."""

    needs_fla: bool = False
    """Belongs to flash-linear-attention."""

    holds_states: bool = False
    """Keeps a state for every token: memory grows with N d^2."""

    def problem(self, case: Case, device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        if self.needs_fla:
            if importlib.util.find_spec("fla") is None:
                return f"{FLA} is not installed: {install('gpu')}"
            if device.type != "cuda":
                return f"{FLA} needs a GPU"
        if self.holds_states:
            # The state of every token, its product with the value, and the gradients of both.
            needed = 4 * 4 * case.all_tokens * case.heads * case.head_dim**2
            if needed > MEMORY_SHARE * free_memory(device):
                return f"needs about {needed / 2**30:.0f} GiB"
        return None


def core_of(
    implementation: Implementation,
    case: Case,
    device: torch.device,
    shard: HeadShard,
    reference: torch.dtype | None,
) -> tuple[Core, list[nn.Parameter]]:
    """The function to run, for the heads of a shard, and its weights in float32.

    reference: instead our modules for the same attention, with weights of this dtype.
    """
    if implementation.build is not None and reference is None:
        return implementation.build(), []
    attention = attention_of(implementation.preset, case)
    if not implementation.normalize:
        return partial(kernel_attention, feature_map=attention.feature_map.name, normalize=False), []
    module = build(attention, num_heads=case.heads, head_dim=case.head_dim, heads=shard, rotary=False)
    module = module.to(device, reference or torch.float32).eval()
    core = _with_equal_logits(module) if module.spec.further else module
    return core, list(module.parameters())


def _equal_logits(k: Tensor, numbers: int) -> AttentionInputs:
    """Logits 0 of decay and write strength, the same for all tokens of k (B, H, N, d)."""
    return AttentionInputs(further=k.new_zeros(*k.shape[:3], numbers))


def _with_equal_logits(module: AttentionLayer) -> Core:
    return lambda q, k, v: module(q, k, v, _equal_logits(k, module.spec.further))


def _fla(function: str, normalize: bool) -> Callable[[], Core]:
    """flash-linear-attention's linear attention after elu + 1, which its layers apply as a separate pass."""

    def make() -> Core:
        from fla.ops import linear_attn

        op = getattr(linear_attn, function)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return op(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=normalize)[0]

        return run

    return make


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention straight from its formula: a cumulative sum gives the state of every token."""
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
        Implementation(SELECTED, "selected", is_ours=True),
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
        Implementation("eager elu", "linear", build=lambda: _eager, holds_states=True),
    )
}
"""Implementation by name. FLuRKA's kernel parent is `kernel hedgehog`, with the same feature map."""

LAYERS = {
    preset: Implementation(preset, preset, is_ours=preset != "softmax")
    for preset in ("flurka_rnn", "flurka_performer", "linformer", "linear", "performer", "softmax")
}
"""Whole layers, by preset."""

IMPLEMENTATIONS = ATTENTIONS | LAYERS
