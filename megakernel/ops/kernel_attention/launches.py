"""What the launches of kernel attention's kernels have in common: the sizes of a call, and the states between them."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.kernels import states
from megakernel.ops.kernels.features import Phi, padded, phi_of
from megakernel.ops.kernels.launch import Tiles, launch, tiles
from megakernel.ops.state import KernelState

FEATURES_AT_ONCE = 16
"""Rows of a state that one program passes from segment to segment."""


def tiles_of(state: KernelState, phi: Phi, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """A state as kernels read it: sums (B, H_kv, FP, VP), normalizers (B, H_kv, FP), log scales."""
    halves = phi.features // phi.rows
    lead = state.sums.unflatten(2, (halves, phi.rows)).to(torch.float32)
    whole = torch.nn.functional.pad(lead, (0, 0, 0, phi.padded_rows - phi.rows)).flatten(2, 3)
    sums = torch.nn.functional.pad(whole[..., :-1], (0, padded(value_dim) - value_dim))
    return sums.contiguous(), whole[..., -1].contiguous(), state.log_scale.to(torch.float32).contiguous()


def state_of(sums: Tensor, norms: Tensor, logs: Tensor, phi: Phi, value_dim: int) -> KernelState:
    """The inverse of `tiles_of`."""
    halves = phi.features // phi.rows
    whole = torch.cat([sums[..., :value_dim], norms[..., None]], -1)
    kept = whole.unflatten(2, (halves, phi.padded_rows))[:, :, :, : phi.rows].flatten(2, 3)
    return KernelState(kept, logs.detach())


class Call(NamedTuple):
    """What all launches of a call share."""

    phi: Phi
    tiles: Tiles
    group: int
    causal: bool
    normalize: bool
    start: int

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        matrix: Tensor | None,
        feature_map: str,
        components: int,
        causal: bool,
        normalize: bool,
        start: int,
    ) -> "Call":
        """The call with these arguments."""
        rows = None if matrix is None else matrix.shape[-2]
        phi = phi_of(FeatureMap(feature_map, components), q.shape[-1], rows)
        return Call(phi, tiles(phi, q, v), q.shape[1] // k.shape[1], causal, normalize, start)

    def options(self, kernel: str, v: Tensor, starts: Tensor | None) -> dict[str, Any]:
        """Warps, stages and compile-time arguments of a kernel with tokens."""
        tile = self.tiles.of(kernel)
        return {
            "warps": tile.warps,
            "stages": tile.stages,
            "SEGMENT": self.tiles.segment,
            "C": tile.chunk,
            "V": v.shape[-1],
            "VP": self.tiles.width,
            "BV": tile.values,
            "PACKED": starts is not None,
            "PHI": self.phi,
        }

    def segments(self, length: int) -> int:
        """Of a row."""
        return triton.cdiv(length, self.tiles.segment)

    def grid(self, kernel: str, k: Tensor, length: int) -> tuple[int]:
        """Programs of a kernel for `length` tokens of each key head, see `states.share_of_program`."""
        return (k.shape[0] * k.shape[1] * self.segments(length) * self.tiles.blocks(kernel),)

    def parts(self, kernel: str, tokens: Tensor, width: int) -> Tensor:
        """Room for rows of gradients (blocks, B, H, N, width) that the blocks of values of a kernel add up to."""
        blocks = self.tiles.blocks(kernel)
        dtype = torch.float32 if blocks > 1 else tokens.dtype
        return tokens.new_empty(blocks, *tokens.shape[:3], width, dtype=dtype)

    def empty_states(self, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for the states of every segment and the last one."""
        lead = (k.shape[0], k.shape[1], self.segments(length) + 1)
        size = self.phi.padded_features
        sums = k.new_empty(*lead, size, self.tiles.width, dtype=torch.float32)
        return sums, sums.new_empty(*lead, size), sums.new_empty(lead)

    def pass_on(
        self,
        room: tuple[Tensor, Tensor, Tensor],
        first: tuple[Tensor | None, Tensor | None, Tensor | None],
        starts: Tensor | None,
        length: int,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states that enter each segment, from what each segment adds."""
        sums, norms, added = room
        entering, logs = torch.empty_like(norms), torch.empty_like(added)
        features, values = sums.shape[-2:]
        entered = [unused if given is None else given for given, unused in zip(first, (sums, norms, added))]
        launch(
            states.pass_states,
            (sums.shape[0] * sums.shape[1], triton.cdiv(features, FEATURES_AT_ONCE)),
            *(sums, norms, added, entering, logs, *entered, added if starts is None else starts),
            *(length, self.start, sums.shape[1], sums.shape[2] - 1),
            warps=4,
            SEGMENT=self.tiles.segment,
            FP=features,
            VP=values,
            BF=FEATURES_AT_ONCE,
            PACKED=starts is not None,
            FIRST=first[0] is not None,
            REVERSE=reverse,
            CAUSAL=self.causal,
            UNBOUNDED=self.phi.unbounded,
        )
        return sums, entering, logs


def given_or_zeros(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None], out: Tensor, sums: Tensor, norms: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the output and of the last of these states; autograd makes up none for what has none.

    It would fill one for each output of an op, those that nobody differentiates included.
    """
    likes = (out, sums[:, :, -1], norms[:, :, -1])
    return tuple(torch.zeros_like(like) if grad is None else grad for grad, like in zip(grads, likes))


def total(parts: Tensor, like: Tensor) -> Tensor:
    """The sum of the parts (blocks, ...) of a gradient, in the dtype of `like`; one part is the gradient itself."""
    return parts[0] if len(parts) == 1 else parts.sum(0).to(like.dtype)
