"""The start of a run's model: layer by layer, each matrix drawn by one rank.

A whole model in float32 in every process would need the memory of all of them on the host, and ZeRO 3 one on each
device before it shards.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megakernel.parallel import Mesh

_SENT_NUMBERS = 2**24
"""Most numbers of a whole matrix that are on the device at once, 64 MiB in float32."""


class LayerStart:
    """Builds a rank's layers one after the other on their device; called alike on all ranks that hold the same layers.

    The ranks of `mesh.gradient` hold the same shards, and those of `mesh.tp` shards of the same matrices. One of all
    these ranks draws a layer: it sends whole matrices along tp, where they are partitioned, and then each tensor rank
    its shard along gradient. Draws are functions of (seed, layer), so it does not matter who draws.
    """

    def __init__(self, mesh: Mesh, dtype: torch.dtype, shard: Callable[[nn.Module], None] | None = None):
        """dtype: that the layers are trained in. shard: ZeRO 3 of one layer; None: layers stay whole."""
        self._mesh = mesh
        self._dtype = dtype
        self._shard = shard
        self._source = 0
        """Rank along gradient of the layer's values."""
        self._drawer = 0
        """Rank along tp that draws them."""

    def build(self, index: int, build: Callable[[], nn.Module]) -> nn.Module:
        """The layer `index` of the list, on the device. build: builds it on the host, drawing by `draw`."""
        self._drawer, self._source = divmod(index, self._mesh.gradient.size)
        self._drawer %= self._mesh.tp.size
        layer = build()
        for parameter in layer.parameters():
            self._place(parameter)
        for buffer in layer.buffers():
            # Not Module.to, which replaces buffers: they would lose the attributes of their partition.
            buffer.data = buffer.data.to(self._mesh.device)
        if self._shard is not None:
            self._shard(layer)
        return layer

    @torch.no_grad()
    def draw(self, matrix: Tensor, fill: Callable[[Tensor], object]) -> None:
        """Fill a whole matrix as `fill` does, on the ranks whose layer is sent on; the others leave it as it is."""
        tp = self._mesh.tp
        if self._mesh.gradient.rank != self._source:
            return
        if tp.rank == self._drawer:
            fill(matrix)
        if tp.size > 1:
            for rows in matrix.detach().split(max(1, _SENT_NUMBERS // matrix[0].numel())):
                message = rows.to(self._mesh.device)
                dist.broadcast(message, group=tp.group, group_src=self._drawer)
                rows.copy_(message)

    @torch.no_grad()
    def _place(self, parameter: nn.Parameter) -> None:
        gradient, device = self._mesh.gradient, self._mesh.device
        if gradient.rank == self._source:
            parameter.data = parameter.data.to(device, self._dtype)
        else:
            parameter.data = torch.empty_like(parameter, device=device, dtype=self._dtype)
        if gradient.size > 1:
            dist.broadcast(parameter.data, group=gradient.group, group_src=self._source)
