"""Options of the feature map phi of similarity `kernel`, and the sizes that follow from them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from .errors import Problem, nearest_multiples
from .section import Section

FeatureMapName = Literal[
    "elu",
    "relu",
    "identity",
    "hedgehog",
    "favor",
    "rff",
    "gmm_rks",
    "gmm_prf",
    "fastfood_rks",
    "fastfood_prf",
    "generative_rks",
    "generative_prf",
]

_GMM = ("gmm_rks", "gmm_prf")
_FASTFOOD = ("fastfood_rks", "fastfood_prf")
_GENERATIVE = ("generative_rks", "generative_prf")
LEARNED = (*_GMM, *_FASTFOOD, *_GENERATIVE)
"""Maps with learned frequencies."""

_RANDOM = ("favor", "rff", *LEARNED)
_TAKEN_BY: dict[str, tuple[str, ...]] = {
    "samples": _RANDOM,
    "components": _GMM,
    "tied": ("gmm_rks",),
    "learn": _FASTFOOD,
    "resample_every": ("favor", "rff", *_GMM, *_GENERATIVE),
}
"""Option -> maps that use it."""


_ELEMENTWISE = {"elu": 1.0, "relu": 0.0, "identity": 0.0}
"""Maps of every component by itself -> the square of what they make of 0."""


def _is_trigonometric(name: str) -> bool:
    return name == "rff" or name.endswith("_rks")


class FeatureMap(Section):
    """The feature map phi of similarity `kernel`: the weight of key k for query q is phi(q).phi(k)."""

    name: FeatureMapName = "hedgehog"
    """Which phi (docs/formulas.md, 2). `_rks`: cosines and sines; `_prf`: positive exponentials."""

    samples: int | None = Field(default=None, gt=0, le=1_000_000)
    """Random samples M; None: as many as make phi 2 x head_dim wide (4 x for gmm_rks). More estimate the kernel with
    less variance and enlarge phi and the state."""

    components: int = Field(default=2, gt=0, le=10_000)
    """Gaussians C in the spectral mixture of gmm_rks and gmm_prf."""

    tied: bool = True
    """gmm_rks: its two components have means +mu and -mu and share one covariance; false: each has its own."""

    learn: Literal["SGB", "S", "fixed"] = "SGB"
    """Trained diagonals of fastfood's S H G Pi H B: all three, S alone, or none (`fixed`)."""

    smoothing: float = Field(default=None, ge=0)  # type: ignore[assignment]
    """Constant feature s: the kernel becomes phi(q).phi(k) + s^2. None: 1 for maps of cosines (rff, _rks), whose
    denominators can vanish, as in the published results; 0 for others."""

    resample_every: int | None = Field(default=None, ge=0)
    """Training steps between redraws of the noise; 0: never; None: 100 for gmm and generative maps, else 0."""

    @field_validator("smoothing", mode="before", json_schema_input_type=Annotated[float, Field(ge=0)] | None)
    @classmethod
    def _of_the_map(cls, value: Any, info: ValidationInfo) -> Any:
        # A value, and not None, in the tree: recorded runs keep it.
        return float(_is_trigonometric(info.data.get("name", ""))) if value is None else value

    def problems(self) -> Iterator[Problem]:
        """Options without effect on this map, or that contradict each other."""
        yield from self.without_effect("name", _TAKEN_BY)
        if self.is_tied and self.components != 2:
            reason = "components cannot be a pair +mu, -mu"
            yield self.problem("components", reason, "set components: 2 or tied: false")

    def problems_at(self, head_dim: int) -> Iterator[Problem]:
        """Options that do not fit the head width."""
        if self.kind == "fastfood" and self.sample_count(head_dim) % head_dim:
            remedy = f"set {nearest_multiples(self.sample_count(head_dim), head_dim)}"
            yield self.problem("samples", f"is not a multiple of head_dim={head_dim}", remedy)

    @property
    def kind(self) -> str:
        """The source of learned frequencies (gmm, fastfood or generative), or the name of a map without any."""
        return self.name.partition("_")[0]

    @property
    def is_tied(self) -> bool:
        """Whether the mixture is two components +-mu with one covariance."""
        return self.name == "gmm_rks" and self.tied

    @property
    def is_unbounded(self) -> bool:
        """Whether phi consists of positive exponentials without an upper bound."""
        return self.name == "favor" or self.name.endswith("_prf")

    @property
    def is_exponential(self) -> bool:
        """Whether phi consists of exponentials, so that a product of two is tiny, but never exactly 0."""
        return self.is_unbounded or self.name in ("elu", "hedgehog")

    @property
    def is_trigonometric(self) -> bool:
        """Whether phi consists of cosines and sines (random kitchen sinks)."""
        return _is_trigonometric(self.name)

    def similarity_at_zero(self, head_dim: int) -> float:
        """phi(0).phi(0): 0 for relu and identity; exp(q.k) of softmax would give 1."""
        if self.name in _ELEMENTWISE:
            at_zero = _ELEMENTWISE[self.name] * head_dim
        elif self.name == "hedgehog":
            at_zero = 2 / head_dim
        else:
            assert self.name in _RANDOM, f"{self.name} needs a case here"
            at_zero = float(self.components) if self.kind == "gmm" else 1.0
        return at_zero + self.smoothing**2

    @property
    def redraw_interval(self) -> int:
        """Training steps between redraws of the noise; 0: never redrawn."""
        if self.resample_every is not None:
            return self.resample_every
        return 100 if self.kind in ("gmm", "generative") else 0

    def sample_count(self, head_dim: int) -> int:
        """Random samples M (each gives C frequencies of a C-component mixture); 0 for maps without noise."""
        if self.name not in _RANDOM:
            return 0
        if self.samples is not None:
            return self.samples
        one_each = self.name in ("favor", "fastfood_prf", "generative_prf")
        return 2 * head_dim if one_each else head_dim

    def frequencies(self, head_dim: int) -> int:
        """Rows of omega; 0 for maps without one."""
        return self.sample_count(head_dim) * (self.components if self.kind == "gmm" else 1)

    def width(self, head_dim: int) -> int:
        """F, the length of phi(x)."""
        if self.name in _ELEMENTWISE:
            width = head_dim
        elif self.name == "hedgehog":
            width = 2 * head_dim
        else:
            assert self.name in _RANDOM, f"{self.name} needs a case here"
            width = (2 if self.is_trigonometric else 1) * self.frequencies(head_dim)
        return width + (self.smoothing > 0)
