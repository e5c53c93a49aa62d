"""What a feature map needs beside the tokens: W of hedgehog, frequencies omega, or nothing."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megakernel.attention.heads import Seed, generator
from megakernel.attention.noise import Noise
from megakernel.attention.precision import FullPrecision
from megakernel.config.feature_map import FeatureMap
from megakernel.ops import feature_maps as ops
from megakernel.ops.projections import Projection as OpProjection

Draw = Callable[[torch.Generator], Tensor]
"""Random numbers of one head from its stream."""


class Projection(FullPrecision):
    """Called without arguments, gives the projection of the op's feature map; of a map that has none, None."""

    def __init__(self, form: FeatureMap, head_dim: int):
        super().__init__()
        self.feature_map = op_map(form)
        """What the op is told beside the projection."""
        self.features = form.width(head_dim)
        """F, features of one token."""

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads, of parameters and buffers that belong to heads."""
        return dict.fromkeys(self.state_dict(), 0)

    def forward(self) -> OpProjection | None:
        """One matrix per key head, (H_kv, M, d), one for all, (M, d), or a `FastFood`."""
        return None


class Hedgehog(Projection):
    """W per key head, from the identity."""

    def __init__(self, form: FeatureMap, kv_heads: range, head_dim: int):
        super().__init__(form, head_dim)
        self.matrix = nn.Parameter(torch.eye(head_dim).repeat(len(kv_heads), 1, 1))

    def forward(self) -> Tensor:
        """W, (H_kv, d, d)."""
        # A copy, not the parameter: ZeRO 3 takes a parameter apart as soon as the module that holds it has run.
        return self.matrix.clone()


class RandomMatrix(Projection):
    """Gaussian omega that nothing learns: orthogonal rows for favor, independent ones for rff."""

    def __init__(self, form: FeatureMap, kv_heads: range, head_dim: int, seed: Seed):
        super().__init__(form, head_dim)
        rows = orthogonal_gaussian if form.name == "favor" else gaussian
        samples = form.sample_count(head_dim)
        draw = drawn_per_head(kv_heads, seed, lambda stream: rows(samples, head_dim, stream))
        self.matrix = Noise(draw, form.redraw_interval)

    def forward(self) -> Tensor:
        """omega, (H_kv, M, d)."""
        return self.matrix()


def op_map(form: FeatureMap) -> ops.FeatureMap:
    """The elementwise part of a map: where omega comes from makes no difference to the op."""
    name: str = "rks" if form.name == "rff" else form.name
    if name.endswith(("_rks", "_prf")):
        name = name[-3:]
    return ops.FeatureMap(name, form.components if form.is_gmm else 1, form.smoothing)


def drawn_per_head(kv_heads: range, seed: Seed, draw: Draw) -> Callable[[int], Tensor]:
    """From a draw's number to (H_kv, ...), each head's part from a stream of its own."""

    def numbered(number: int) -> Tensor:
        # Number 0 is the stream of the head itself, from which a map without redraws takes its one draw.
        place = (number,) if number else ()
        return torch.stack([draw(generator(seed, head, *place)) for head in kv_heads])

    return numbered


def gaussian(samples: int, width: int, stream: torch.Generator) -> Tensor:
    """(samples, width) independent standard normal numbers, float64."""
    return torch.randn(samples, width, generator=stream, dtype=torch.float64, device="cpu")


def orthogonal_gaussian(samples: int, width: int, stream: torch.Generator) -> Tensor:
    """(samples, width) float64: orthogonal directions in every `width` rows, lengths of Gaussian vectors."""
    blocks = []
    for _ in range(-(-samples // width)):
        directions, upper = torch.linalg.qr(gaussian(width, width, stream))
        # The signs make the directions uniform over all rotations.
        blocks.append((directions * upper.diagonal().sign()).T)
    lengths = gaussian(samples, width, stream).norm(dim=1)
    return torch.cat(blocks)[:samples] * lengths[:, None]
