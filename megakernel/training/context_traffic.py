"""What a step sends between the shards of a sequence, as numbers to log."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megakernel.parallel.sequence import GroupShard


class ContextTraffic:
    """Sums what the layers of this process have sent in training steps."""

    def __init__(self, model: nn.Module):
        shards = (getattr(module, "cp_shard", None) for module in model.modules())
        self._layers = [shard.traffic for shard in shards if isinstance(shard, GroupShard)]
        self._sent: Counter[str] = Counter()
        self._late = 0
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step; what evaluations sent before is left out."""
        for layer in self._layers:
            layer.take()
        yield
        self._steps += 1
        for layer in self._layers:
            sent, late = layer.take()
            self._sent += sent
            self._late += late

    def scalars(self) -> dict[str, float]:
        """Since the last call, under TensorBoard tags; nothing where no sequence is cut.

        `traffic/context_KIND_mib` is what this process sends per layer and step; `traffic/late_exchanges` counts,
        per step, states for which local work was over too early (on CPU; a GPU's queue hides them from the count).
        """
        if not self._layers:
            return {}
        share = 1 / (2**20 * len(self._layers) * self._steps)
        scalars = {f"traffic/context_{kind}_mib": sent * share for kind, sent in self._sent.items()}
        scalars["traffic/late_exchanges"] = self._late / self._steps
        self._sent, self._late, self._steps = Counter(), 0, 0
        return scalars
