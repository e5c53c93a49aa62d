"""Low-rank updates folded into the projections that they update."""

from collections.abc import Iterable

from torch import Tensor

from megakernel.config import Config, Lora, Model

from .universal import STATE, WEIGHT, WholeTensors

_VALUE, _OUTPUT = ".value_update.", ".output_update."


def without_updates(source: WholeTensors, config: Config) -> WholeTensors:
    """A run's checkpoint as one of a model without low-rank updates; the same where it has none."""
    lora = config.optimizer.updates
    return source if lora is None else Folded(source, config.model, lora)


class Folded:
    """A checkpoint with low-rank updates as one without (`WholeTensors`): W + alpha / rank B A in place of W."""

    def __init__(self, source: WholeTensors, model: Model, lora: Lora):
        """model: what the checkpoint is of."""
        self._source, self._model = source, model
        self._scale = lora.alpha / lora.rank

    @property
    def names(self) -> set[str]:
        """All parameters and buffers but the updates."""
        return {name for name in self._source.names if _VALUE not in name and _OUTPUT not in name}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._source.shape(name)

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Those of `keys` that are known of a tensor; of one that was updated its value alone, in float32.

        An update may be smaller than what a frozen bfloat16 weight can tell apart.
        """
        layer, _, kind = name.partition(".self_attention.")
        updated = {"qkv.weight": "value_update", "output.weight": "output_update"}.get(kind)
        update = f"{layer}.self_attention.{updated}."
        if updated is None or f"{update}up" not in self._source.names:
            return self._source.read(name, keys)
        if WEIGHT not in keys:
            return {}
        weight, up, down = (
            self._source.read(part, [WEIGHT])[WEIGHT] for part in (name, f"{update}up", f"{update}down")
        )
        change = self._scale * (up.float() @ down.float())
        whole = weight.float().clone()
        target = self._values(whole) if updated == "value_update" else whole
        target += change.view_as(target)
        return {WEIGHT: whole}

    def _values(self, fused: Tensor) -> Tensor:
        """The values' rows (H_kv, d, C) of a fused projection, whose rows are grouped by key head; a view."""
        model = self._model
        return fused.view(model.kv_heads, -1, model.head_size, fused.shape[-1])[:, -1]
