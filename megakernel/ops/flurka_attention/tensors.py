"""The tensors and options of FLuRKA's operator, by name."""

from typing import NamedTuple

from torch import Tensor

from megakernel.ops.kernels.arguments import Keys, Rows, Tokens


class FlurkaQueryTensors(NamedTuple):
    """Tensors of queries and of the merge of window and landmarks, and their gradients."""

    q: Tensor
    """(B, H, N, d)"""

    gate: Tensor | None = None
    """See `MergeParams`, like the next two."""

    gate_weight: Tensor | None = None
    far_weight: Tensor | None = None
    table: Tensor | None = None
    """See `Window`."""


class FlurkaKeyTensors(NamedTuple):
    """Tensors of keys and landmarks, and their gradients."""

    k: Tensor
    """(B, H_kv, before + N, d), beginning with the tail's keys; v likewise."""

    v: Tensor
    pool_keys: Tensor
    """E (r, b) or (H_kv, r, b) float32; F likewise."""

    pool_values: Tensor
    projection: Tensor | None = None
    """(M, d) or (H_kv, M, d)"""

    log_decay: Tensor | None = None
    """(B, H_kv, N)"""

    far_mass: Tensor | None = None
    """beta, see `Pools`."""

    starts: Tensor | None = None
    """See `SequenceInfo`, like `ends`."""

    windows: Tensor | None = None
    """See `Window`."""

    ends: Tensor | None = None


class FlurkaStatic(NamedTuple):
    """What is no tensor."""

    feature_map: str
    components: int
    near: str
    """softmax or kernel"""

    blocks: int
    """Blocks per window, including the current one."""

    start: int
    """See `SequenceInfo`."""

    before: int
    """See `Window`, like `oldest`."""

    oldest: int
    trains: bool
    """Whether backward may follow."""


class FlurkaOutputs(NamedTuple):
    """Outputs (B, H, N, D), their spread, and the fields of `Merged`; unused tensors are empty."""

    out: Tensor
    spread: Tensor
    factor: Tensor
    lse: Tensor
    scale: Tensor
    share: Tensor
    logit: Tensor


class SavedLandmarks(NamedTuple):
    """Landmarks and what goes with them; unused tensors are empty."""

    landmarks: Tensor
    values: Tensor
    features: Tensor
    feature_logs: Tensor
    token_count: Tensor
    terms: Tensor
    """The split projection."""

    @property
    def keys(self) -> Keys:
        """The landmarks as keys of kernel attention's kernels."""
        logs = self.feature_logs if self.feature_logs.numel() else None
        tokens = Tokens(Rows.of(self.landmarks), self.features, logs)
        return Keys(tokens, Rows.of(self.values), self.token_count, None)
