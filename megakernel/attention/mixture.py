"""Several keys per position, in any mechanism that weighs keys (docs/formulas.md, 6)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.layer import FullPrecision
from megakernel.config.algebra import Mixture
from megakernel.ops.tensors import accum_dtype


class KeyMixture(FullPrecision):
    """Parameters of the M keys of a position: shifts b of shifted keys, priors pi of a soft mixture."""

    weights: Tensor
    """(H_kv, M): pi before clamping, learned by gradients or set by the M-step."""

    counted: Tensor
    """(H_kv, M) float64: sums of responsibilities since the last M-step."""

    def __init__(self, mixture: Mixture, settings: LayerSettings):
        super().__init__()
        self.heads, kv_heads = settings.heads, settings.kv_heads
        self.shifted = mixture.kind == "shifted"
        device = torch.get_default_device()
        if self.shifted:
            streams = [generator(settings.seed, head, "shift") for head in kv_heads]
            shape = (mixture.keys, settings.head_dim)
            draws = [torch.randn(shape, generator=stream, device="cpu") for stream in streams]
            self.shift = nn.Parameter(torch.stack(draws).to(device))
        self.log_sigma2 = None
        """(H_kv, M): logarithms of learned variances in units of sqrt(d)."""
        if mixture.sigma2 == "learned":
            self.log_sigma2 = nn.Parameter(torch.zeros(len(kv_heads), mixture.keys))
        self.soft = mixture.estep == "soft"
        self.m_step = mixture.m_step
        if self.soft:
            equal = torch.full((len(kv_heads), mixture.keys), 1 / mixture.keys)
            if self.m_step:
                self.register_buffer("weights", equal)
                self.register_buffer("counted", torch.zeros_like(equal).double(), persistent=False)
            else:
                self.weights = nn.Parameter(equal)

    def keys(self, k: Tensor) -> Tensor:
        """The keys (B, H_kv, M, N, d): k itself, or k (B, H_kv, N, d) plus the shifts in float32 or better."""
        if not self.shifted:
            return k
        # Half precision could round a small shift away.
        dtype = accum_dtype(k.dtype)
        return k.to(dtype)[:, :, None] + self.shifts().to(dtype)[:, :, None]

    def shifts(self) -> Tensor:
        """b (H_kv, M, d) of shifted keys."""
        return self.heads.of_key_head(self.shift)

    def precisions(self) -> Tensor | None:
        """1 / sigma^2 (H_kv, M) in units of 1 / sqrt(d), float32 or better; None: variances are not learned."""
        if self.log_sigma2 is None:
            return None
        return self.heads.of_key_head(self.log_sigma2).to(accum_dtype(self.log_sigma2.dtype)).neg().exp()

    def priors(self) -> Tensor:
        """pi (H_kv, M) in [0, 1], float32 or better."""
        assert self.soft
        return self.heads.of_key_head(self.weights).to(accum_dtype(self.weights.dtype)).clamp(0, 1)

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads: all of them."""
        return dict.fromkeys(self.state_dict(), 0)

    def finish_step(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """The M-step: set priors to the mean responsibilities of all pairs since the last M-step.

        A head keeps its priors if there were none, or if queries or keys were not finite.
        """
        counted = all_reduce(self.counted)
        total = counted.sum(-1, keepdim=True)
        self.weights.copy_(torch.where((total > 0) & total.isfinite(), counted / total, self.weights))
        self.counted.zero_()


def build_mixture(config: Mixture | None, settings: LayerSettings) -> KeyMixture | None:
    """The mixture of one layer for the key heads of one shard; None with one key per position."""
    return None if config is None else KeyMixture(config, settings)


def priors_and_shift(mixture: KeyMixture | None) -> tuple[Tensor | None, Tensor | None]:
    """pi and b for an op that shifts keys itself; None for those that the mixture lacks."""
    if mixture is None:
        return None, None
    return mixture.priors(), mixture.shifts() if mixture.shifted else None


def keys_and_priors(mixture: KeyMixture | None, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """The M keys of each position and their priors; k itself and None without a mixture."""
    if mixture is None:
        return k, None
    return mixture.keys(k), mixture.priors() if mixture.soft else None
