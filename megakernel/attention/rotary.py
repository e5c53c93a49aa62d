"""Rotary position embedding, and its frequencies for sequences longer than the training length."""

import math
from functools import partial

import torch
from torch import Tensor

from megakernel.config.rope import RopeScaling
from megakernel.ops.documents import Positions, cached_for_positions, token_positions
from megakernel.ops.layers import rotate
from megakernel.ops.layers.plain import rotate_one
from megakernel.ops.tensors import accum_dtype

Tables = tuple[Tensor, ...]
"""Factors of a vector, and of the vector with the two halves of its pairs swapped."""


class Rotary:
    """Rotates pairs (x_j, x_{j + d/2}) by position * base^(-2j/d), or by a scaled frequency.

    d is head_dim; only the first head_dim components of wider vectors are rotated. The dot product of two rotated
    vectors depends only on the difference of their positions.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0, scaling: RopeScaling | None = None):
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim}: rotary positions need an even width")
        self.head_dim = head_dim
        self.base = base
        self.frequencies, self.scale = frequencies(head_dim, base, scaling or RopeScaling())
        self._device_frequencies: dict[torch.device, Tensor] = {}
        self._position_tables: dict[tuple[int, int, torch.device], Tensor] = {}
        self._token_tables: tuple[object, Tables] | None = None
        self._sequence_angles: tuple[object, tuple[Tensor, Tensor]] | None = None
        self._relative_tables: dict[tuple[torch.device, torch.dtype], Tables] = {}

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, H, N, d) by positions (B, N) or (1, N), which may be fractional; in the dtype of x."""
        angles = self._angles(positions, accum_dtype(x.dtype))
        return self._with_unrotated(rotate_one(x[..., : self.head_dim], *angles), x)

    def rotate_qk(self, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Rotate q (B, H, N, d) and k (B, H_kv, N, d) by the same positions."""
        if q.shape[2] == 1 and q.device.type == "cpu" and not torch.compiler.is_compiling():
            cos, sin = self._tables_of_token(positions, accum_dtype(q.dtype))
            return self._rotate_by_tables(q, cos, sin), self._rotate_by_tables(k, cos, sin)
        cos, sin = self._shared_angles(positions, q)
        rotated_q, rotated_k = rotate(q[..., : self.head_dim], k[..., : self.head_dim], cos, sin)
        return self._with_unrotated(rotated_q, q), self._with_unrotated(rotated_k, k)

    def relative_to_last(self, x: Tensor) -> Tensor:
        """Keys x (B, H, n, d) of the last n tokens, rotated relative to the last token; in the dtype of x.

        The unrotated query of the last token has the same dot products with them as rotated queries and keys have.
        """
        key, count = (x.device, x.dtype), x.shape[-2]
        if key not in self._relative_tables or len(self._relative_tables[key][0]) < count:
            size = count + -count % 64  # rounded up, because windows grow token by token
            # The unrotated query lacks the factor `scale`, so keys get it twice: once here, once in `cos_sin`.
            offsets = torch.arange(1 - size, 1, device=x.device)
            self._relative_tables[key] = self._tables(offsets, x.dtype, self.scale)
        cos, sin = self._relative_tables[key]
        return self._rotate_by_tables(x, cos[-count:], sin[-count:])

    def at_start(self, x: Tensor) -> Tensor:
        """x (B, H, N, d) rotated by no position: itself, unless rotation also multiplies vectors by `scale` (YaRN)."""
        if self.scale == 1.0:
            return x
        return self(x, torch.zeros(1, x.shape[2], device=x.device, dtype=torch.int64))

    def _tables_of_token(self, positions: Positions, dtype: torch.dtype) -> Tables:
        """Tables (B or 1, 1, 1, head_dim) of one token, cached because all layers of a model need the same."""
        key = (positions if isinstance(positions, int) else positions.flatten().tolist(), dtype)
        cached = self._token_tables
        if cached is None or cached[0] != key:
            cached = self._token_tables = key, self._tables(torch.tensor(key[0]).view(-1, 1, 1), dtype)
        return cached[1]

    def _tables(self, positions: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tables:
        """Cosines for both components of each pair, and sines with the sign of the swapped component."""
        with torch.inference_mode(False):  # the tables are cached, and training may use them next
            cos, sin = ((factor * x).to(dtype) for x in self.cos_sin(positions))
            return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _rotate_by_tables(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, H, N, d) with its first head_dim components rotated by tables; in the dtype of x."""
        pairs = x[..., : self.head_dim].to(cos.dtype)
        rotated = torch.addcmul(pairs * cos, pairs.roll(self.head_dim // 2, -1), sin)
        return self._with_unrotated(rotated.to(x.dtype), x)

    def _with_unrotated(self, rotated: Tensor, x: Tensor) -> Tensor:
        """The rotated first head_dim components of x, followed by its other components."""
        return torch.cat([rotated, x[..., self.head_dim :]], -1) if self.head_dim < x.shape[-1] else rotated

    def _shared_angles(self, positions: Positions, like: Tensor) -> tuple[Tensor, Tensor]:
        """`_angles` for the tokens `like` (B, H, N, d), cached for all layers."""
        dtype = accum_dtype(like.dtype)
        if isinstance(positions, Tensor):
            return cached_for_positions(positions, (self, dtype), partial(self._angles, dtype=dtype))
        tokens = (positions, like.shape[2], like.device)
        if torch.compiler.is_compiling():
            return self._angles(token_positions(*tokens), dtype)
        key, cached = (tokens, dtype), self._sequence_angles
        if cached is None or cached[0] != key:
            with torch.inference_mode(False):
                cached = self._sequence_angles = key, self._angles(token_positions(*tokens), dtype)
        return cached[1]  # not the attribute, which another thread may have replaced

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin(positions)
        return cos.to(dtype), sin.to(dtype)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (..., head_dim / 2) of the angles at positions (...), times `scale`; float64."""
        device = positions.device
        if device not in self._device_frequencies:
            self.prepare(device)
        # At position 10^6 a float32 angle would be off by 0.06.
        angles = positions[..., None] * self._device_frequencies[device]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scale == 1.0 else (self.scale * cos, self.scale * sin)

    def prepare(self, device: torch.device) -> None:
        """Copy the frequencies to a device, once: a copy in every call would synchronize with the GPU.

        Called before a layer is compiled, whose graph would depend on whether another layer has done so.
        """
        self._device_frequencies.setdefault(device, self.frequencies.to(device))

    def table(self, first: int, count: int, device: torch.device) -> Tensor:
        """(count, head_dim) float32: cosines, then sines, of positions `first`, `first` + 1, ...; cached."""
        key = (first, count, device)
        if key not in self._position_tables:
            with torch.inference_mode(False):
                positions = torch.arange(first, first + count, device=device)
                self._position_tables[key] = torch.cat(self.cos_sin(positions), -1).float()
        return self._position_tables[key]


def frequencies(head_dim: int, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Radians per token of each pair (head_dim / 2,), float64, and the factor of rotated vectors.

    linear: f / s, position interpolation (Chen et al. 2023). ntk: base * s^(d / (d - 2)) in place of base, which leaves
    the fastest pair and slows the slowest by s; dynamic: ntk with s L / L0 - (s - 1) in place of s, for sequences of
    L tokens, more than the original L0. yarn, llama3: f or f / s by wavelength, with a ramp between. longrope: one
    divisor per pair.
    """
    factor = scaling.factor or 1.0
    if scaling.kind in ("ntk", "dynamic"):
        if head_dim == 2:
            raise ValueError(
                f"head_dim=2: rope_scaling kind {scaling.kind} needs a second pair; take kind linear"
            )
        base_factor = factor
        if scaling.original_seq_len is not None:
            base_factor = factor * max(scaling.target_seq_len / scaling.original_seq_len, 1.0) - (factor - 1)
        base = base * base_factor ** (head_dim / (head_dim - 2))
    # On the CPU even under `torch.device("meta")`: nothing would fill these in later, as it does weights.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    plain = base**-exponents
    if scaling.kind == "linear":
        return plain / factor, 1.0
    if scaling.kind == "longrope":
        return plain / _longrope_factors(scaling), _longrope_scale(scaling)
    if scaling.kind == "yarn":
        scale = scaling.attention_factor or 0.1 * math.log(factor) + 1.0
        return _interpolated(plain, factor, _yarn_kept(head_dim, base, scaling)), scale
    if scaling.kind == "llama3":
        return _interpolated(plain, factor, _llama3_kept(plain, scaling)), 1.0
    return plain, 1.0


def _longrope_factors(scaling: RopeScaling) -> Tensor:
    """Divisor of each pair's frequency (LongRoPE, Ding et al. 2024)."""
    assert scaling.original_seq_len is not None
    factors = (
        scaling.long_factor if scaling.target_seq_len > scaling.original_seq_len else scaling.short_factor
    )
    return torch.tensor(factors, dtype=torch.float64, device="cpu")


def _longrope_scale(scaling: RopeScaling) -> float:
    """Factor of rotated vectors, which keeps the spread of q.k over more tokens."""
    assert scaling.original_seq_len is not None
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = scaling.factor or 1.0
    return math.sqrt(1 + math.log(factor) / math.log(scaling.original_seq_len)) if factor > 1 else 1.0


def _interpolated(plain: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Frequencies interpolated between `plain` (where `kept` is 1) and `plain` / factor (where it is 0)."""
    return plain * kept + plain / factor * (1 - kept)


def _yarn_kept(head_dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """1 for pairs with many turns within the original length, 0 for those with few (YaRN, section 3.2).

    Pair j turns original_seq_len * base^(-2j/d) / 2 pi times; the ramp is linear in j and has integer ends unless
    `truncate` is false.
    """
    original = scaling.original_seq_len
    assert original is not None

    def pair_with_turns(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_with_turns(scaling.beta_fast or 32.0), pair_with_turns(scaling.beta_slow or 1.0)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    # A ramp of zero width becomes a step.
    return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)


def _llama3_kept(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """1 for wavelengths below original / high_freq_factor, 0 above original / low_freq_factor, linear in the turns."""
    original = scaling.original_seq_len
    assert original is not None
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    turns = original * plain / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)
