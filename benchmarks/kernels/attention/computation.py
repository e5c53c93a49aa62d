"""An implementation with its inputs, ready to run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.attention import ALL_HEADS, AttentionLayer, HeadShard, build
from megakernel.attention.low_rank import LowRankAttention

from .cases import FFN_WIDTH, Case, attention_of
from .implementations import Implementation, core_of

Gradients = tuple[Tensor, ...]


@dataclass(frozen=True)
class Computation:
    """One computation, forward and backward."""

    forward: Callable[[], Tensor]

    leaves: tuple[Tensor, ...]
    """Inputs, then weights; all require gradients."""

    grad_output: Tensor
    """The gradient of the output."""

    inputs: int
    """How many of the leaves are inputs."""

    tokens_first: bool = False
    """Inputs and output are (B, N, H, d) instead of (B, H, N, d)."""

    def infer(self) -> Tensor:
        """The output, without a graph."""
        with torch.no_grad():
            return self.forward()

    def train(self) -> tuple[Tensor, Gradients]:
        """The output and the gradients of the leaves."""
        out = self.forward()
        return out.detach(), torch.autograd.grad(out, self.leaves, self.grad_output, allow_unused=True)


def random_tensors(case: Case, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Random q, k, v and output gradient (B, H, N, d), or x and output gradient (N, B, d_m); the same in every call."""
    random = torch.Generator(device).manual_seed(case.all_tokens)
    if case.is_layer:
        shape: tuple[int, ...] = (case.tokens, case.batch, case.width)
        count = 2
    else:
        shape = (case.batch, case.heads, case.tokens, case.head_dim)
        count = 4
    return [torch.randn(shape, generator=random, device=device, dtype=dtype) for _ in range(count)]


def computation(
    implementation: Implementation,
    case: Case,
    tensors: Sequence[Tensor],
    shard: HeadShard = ALL_HEADS,
    reference: torch.dtype | None = None,
) -> Computation:
    """The implementation on the tensors of `random_tensors`; shard: the heads that these tensors have.

    reference: instead use our modules in this dtype, which implementations are compared with.
    """
    if reference is not None:
        tensors = [x.to(reference) for x in tensors]
    if case.is_layer:
        return _layer(implementation, case, tensors)
    core, weights = core_of(implementation, case, tensors[0].device, shard, reference)
    tokens_first = implementation.tokens_first and reference is None
    if tokens_first:
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    return Computation(lambda: core(q, k, v), (q, k, v, *weights), tensors[3], 3, tokens_first)


def _layer(implementation: Implementation, case: Case, tensors: Sequence[Tensor]) -> Computation:
    """A transformer layer of the paper's models, without norms and biases."""
    x, grad_output = tensors[0].detach().requires_grad_(), tensors[1]
    core = layer_core(implementation.preset, case)
    # Weights are rounded to bfloat16 in every dtype, so that dtypes can be compared.
    core = core.to(x.device, torch.bfloat16).to(x.dtype)
    random = torch.Generator(x.device).manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        weight = torch.randn(rows, columns, generator=random, device=x.device) / math.sqrt(columns)
        return weight.bfloat16().to(x.dtype).requires_grad_()

    projections, output = [matrix(case.width, case.width) for _ in range(3)], matrix(case.width, case.width)
    up, down = matrix(FFN_WIDTH, case.width), matrix(case.width, FFN_WIDTH)

    def forward() -> Tensor:
        mixed = projected_attention(core, case, x, projections)
        y = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), output)
        return F.linear(F.gelu(F.linear(y, up)), down)

    weights = (*projections, output, up, down, *core.parameters())
    return Computation(forward, (x, *weights), grad_output, 1)


def layer_core(preset: str, case: Case) -> AttentionLayer:
    """The attention of a bidirectional layer, with random weights."""
    attention = attention_of(preset, case)
    return build(
        attention, num_heads=case.heads, head_dim=case.head_dim, causal=False, max_positions=case.tokens
    ).eval()


def projected_attention(core: AttentionLayer, case: Case, x: Tensor, projections: Sequence[Tensor]) -> Tensor:
    """Attention (B, H, N, d) of a layer's input (N, B, d_m); projections: three (d_m, d_m), to q, k and v."""
    keys = values = x
    if isinstance(core, LowRankAttention) and core.compresses_input:
        keys, values = core.compress(x, first=0, length=case.tokens).to(x.dtype)
    q, k, v = (
        F.linear(tokens, weight).unflatten(-1, (case.heads, -1)).permute(1, 2, 0, 3)
        for tokens, weight in zip((x, keys, values), projections)
    )
    return core(q, k, v)
