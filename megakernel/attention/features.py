"""The projection of a feature map: omega of favor, W of hedgehog, nothing for the others."""

import torch
from torch import Tensor, nn

from megakernel.attention.heads import Seed, generator
from megakernel.config.attention import FeatureMap


def orthogonal_gaussian(samples: int, width: int, draw: torch.Generator) -> Tensor:
    """(samples, width) float64: orthogonal directions in every `width` rows, lengths of Gaussian vectors."""
    blocks = []
    for _ in range(-(-samples // width)):
        gaussian = torch.randn(width, width, generator=draw, dtype=torch.float64, device="cpu")
        directions, upper = torch.linalg.qr(gaussian)
        # The signs make the directions uniform over all rotations.
        blocks.append((directions * upper.diagonal().sign()).T)
    lengths = torch.randn(samples, width, generator=draw, dtype=torch.float64, device="cpu").norm(dim=1)
    return torch.cat(blocks)[:samples] * lengths[:, None]


class Projection(nn.Module):
    """One matrix per key head, (H_kv, M, d), called without arguments; None where the map has none."""

    def __init__(self, feature_map: FeatureMap, kv_heads: range, head_dim: int, seed: Seed):
        super().__init__()
        self.features = head_dim
        """F, features of one token."""
        self.matrix: Tensor | None = None
        if feature_map.name == "favor":
            self.features = feature_map.samples or 2 * head_dim
            omegas = [
                orthogonal_gaussian(self.features, head_dim, generator(seed, head)) for head in kv_heads
            ]
            del self.matrix
            self.register_buffer("matrix", torch.stack(omegas).float().to(torch.get_default_device()))
        elif feature_map.name == "hedgehog":
            self.features = 2 * head_dim
            self.matrix = nn.Parameter(torch.eye(head_dim).repeat(len(kv_heads), 1, 1))

    def _apply(self, fn, recurse=True):
        """Cast and move, but keep random matrices in float32 or better when the model becomes half precision."""
        before = self._buffers.get("matrix")
        super()._apply(fn, recurse)
        after = self._buffers.get("matrix")
        if before is not None and after is not None and after.dtype.itemsize < 4:
            self._buffers["matrix"] = before.to(after.device)
        return self

    def forward(self) -> Tensor | None:
        """The matrices."""
        # A copy, not the parameter: ZeRO 3 takes a parameter apart as soon as the module that holds it has run.
        return None if self.matrix is None else self.matrix.clone()
