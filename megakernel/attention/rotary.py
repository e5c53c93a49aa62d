"""Rotary position embedding, and its frequencies for sequences longer than those a model has learned from."""

import math
from functools import partial

import torch
from torch import Tensor

from megakernel.config.rope import RopeScaling
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions, made_once, token_positions
from megakernel.ops.layers import rotate
from megakernel.ops.layers.plain import turned

Tables = tuple[Tensor, ...]
"""What vectors, and vectors with the numbers of their pairs exchanged, are multiplied by."""


class Rotary:
    """Rotates pairs (x_j, x_{j + d/2}) by position * base^(-2j/d), or by what a scaling makes of that frequency.

    d is head_dim; of wider vectors the first head_dim numbers are rotated. A dot product of two rotated vectors depends
    on the difference of their positions only.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0, scaling: RopeScaling | None = None):
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim}: rotary positions need an even width")
        self.head_dim = head_dim
        self.base = base
        self.frequencies, self.length = frequencies(head_dim, base, scaling or RopeScaling())
        self._on_device: dict[torch.device, Tensor] = {}
        self._made: dict[tuple[int, int, torch.device], Tensor] = {}
        self._of_last_token: tuple[object, Tables] | None = None
        self._of_sequences: tuple[object, tuple[Tensor, Tensor]] | None = None
        self._before: dict[tuple[torch.device, torch.dtype], Tables] = {}

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, H, N, d) at positions (B, N) or (1, N), whole or fractional; dtype of x."""
        return self._with_rest(
            turned(x[..., : self.head_dim], *self._angles(positions, accum_dtype(x.dtype))), x
        )

    def both(self, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Rotate q (B, H, N, d) and k (B, H_kv, N, d) at the same positions."""
        if q.shape[2] == 1 and q.device.type == "cpu" and not torch.compiler.is_compiling():
            cos, sin = self._tables_of_token(positions, accum_dtype(q.dtype))
            return self._turned(q, cos, sin), self._turned(k, cos, sin)
        cos, sin = self._shared_angles(positions, q)
        of_q, of_k = rotate(q[..., : self.head_dim], k[..., : self.head_dim], cos, sin)
        return self._with_rest(of_q, q), self._with_rest(of_k, k)

    def behind(self, x: Tensor) -> Tensor:
        """Keys x (B, H, n, d) of the last n tokens, turned back by their distance to the last; dtype of x.

        A query of the last token that is not rotated weighs them as one that is rotated weighs rotated keys.
        """
        key, count = (x.device, x.dtype), x.shape[-2]
        if key not in self._before or len(self._before[key][0]) < count:
            made = count + -count % 64  # windows grow token by token
            # What is turned back is multiplied for the query, too.
            places = torch.arange(1 - made, 1, device=x.device)
            self._before[key] = self._tables(places, x.dtype, self.length)
        cos, sin = self._before[key]
        return self._turned(x, cos[-count:], sin[-count:])

    def _tables_of_token(self, positions: Positions, dtype: torch.dtype) -> Tables:
        """Tables (B or 1, 1, 1, head_dim) of one token; the layers of a model ask for the same one after the other."""
        key = (positions if isinstance(positions, int) else positions.flatten().tolist(), dtype)
        if self._of_last_token is None or self._of_last_token[0] != key:
            self._of_last_token = key, self._tables(torch.tensor(key[0]).view(-1, 1, 1), dtype)
        return self._of_last_token[1]

    def _tables(self, positions: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tables:
        """Cosines of both numbers of each pair, and sines with the sign of the other number's share."""
        with torch.inference_mode(False):  # they are kept, and training may be next to use them
            cos, sin = ((factor * x).to(dtype) for x in self.cos_sin(positions))
            return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first head_dim numbers of x (B, H, N, d) turned by tables; dtype of x."""
        pairs = x[..., : self.head_dim].to(cos.dtype)
        return self._with_rest(
            torch.addcmul(pairs * cos, pairs.roll(self.head_dim // 2, -1), sin).to(x.dtype), x
        )

    def _with_rest(self, turned: Tensor, x: Tensor) -> Tensor:
        """`turned`, the first head_dim numbers of x, and those of x that are left."""
        return torch.cat([turned, x[..., self.head_dim :]], -1) if self.head_dim < x.shape[-1] else turned

    def _shared_angles(self, positions: Positions, like: Tensor) -> tuple[Tensor, Tensor]:
        """`_angles` of the tokens `like` (B, H, N, d), made once for all layers."""
        dtype = accum_dtype(like.dtype)
        if isinstance(positions, Tensor):
            return made_once(positions, (self, dtype), partial(self._angles, dtype=dtype))
        tokens = (positions, like.shape[2], like.device)
        if torch.compiler.is_compiling():
            return self._angles(token_positions(*tokens), dtype)
        key = (tokens, dtype)
        if self._of_sequences is None or self._of_sequences[0] != key:
            with torch.inference_mode(False):
                self._of_sequences = key, self._angles(token_positions(*tokens), dtype)
        return self._of_sequences[1]

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin(positions)
        return cos.to(dtype), sin.to(dtype)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What pairs at positions (...) are turned by: cosines and sines (..., head_dim / 2), float64."""
        device = positions.device
        if device not in self._on_device:  # copied once: a copy in every call would wait for the device
            self._on_device[device] = self.frequencies.to(device)
        # Angles in float64: at position 10^6 a float32 angle is off by 0.06.
        angles = positions[..., None] * self._on_device[device]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.length == 1.0 else (self.length * cos, self.length * sin)

    def table(self, first: int, count: int, device: torch.device) -> Tensor:
        """(count, head_dim) float32: cosines, then sines, of the positions from `first` on; made once."""
        key = (first, count, device)
        if key not in self._made:
            with torch.inference_mode(False):
                places = torch.arange(first, first + count, device=device)
                self._made[key] = torch.cat(self.cos_sin(places), -1).float()
        return self._made[key]


def frequencies(head_dim: int, base: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Radians per token of each pair (head_dim / 2,), float64, and what rotated vectors are multiplied by.

    linear: f / s, position interpolation (Chen et al. 2023). ntk: of base * s^(d / (d - 2)), which leaves the fastest
    pair as it is and slows the slowest by s; dynamic: of ntk with s L / L0 - (s - 1) for sequences of L tokens, more
    than the L0 of before. yarn, llama3: f or f / s by wavelength, with a ramp between. longrope: each by its own
    factor.
    """
    factor = scaling.factor or 1.0
    if scaling.kind in ("ntk", "dynamic"):
        if head_dim == 2:
            raise ValueError(
                f"head_dim=2: rope_scaling kind {scaling.kind} needs a second pair; take kind linear"
            )
        grown = factor
        if scaling.original_seq_len is not None:
            grown = factor * max(scaling.target_seq_len / scaling.original_seq_len, 1.0) - (factor - 1)
        base = base * grown ** (head_dim / (head_dim - 2))
    # Named: they are no weights, which a model that is built on no device gets later.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    plain = base**-exponents
    if scaling.kind == "linear":
        return plain / factor, 1.0
    if scaling.kind == "longrope":
        return plain / _longrope_factors(scaling), _longrope_length(scaling)
    if scaling.kind == "yarn":
        length = scaling.attention_factor or 0.1 * math.log(factor) + 1.0
        return _mixed(plain, factor, _yarn_kept(head_dim, base, scaling)), length
    if scaling.kind == "llama3":
        return _mixed(plain, factor, _llama3_kept(plain, scaling)), 1.0
    return plain, 1.0


def _longrope_factors(scaling: RopeScaling) -> Tensor:
    """What each pair's frequency is divided by (LongRoPE, Ding et al. 2024)."""
    assert scaling.original_seq_len is not None
    factors = (
        scaling.long_factor if scaling.target_seq_len > scaling.original_seq_len else scaling.short_factor
    )
    return torch.tensor(factors, dtype=torch.float64, device="cpu")


def _longrope_length(scaling: RopeScaling) -> float:
    """What rotated vectors are multiplied by, which keeps the spread of q.k over more tokens."""
    assert scaling.original_seq_len is not None
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = scaling.factor or 1.0
    return math.sqrt(1 + math.log(factor) / math.log(scaling.original_seq_len)) if factor > 1 else 1.0


def _mixed(plain: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Frequencies of which a share is kept and the rest divided by the factor."""
    return plain * kept + plain / factor * (1 - kept)


def _yarn_kept(head_dim: int, base: float, scaling: RopeScaling) -> Tensor:
    """1 for pairs that turn often within the original length, 0 for those that turn rarely (YaRN, section 3.2).

    Pair j turns original_seq_len * base^(-2j/d) / 2 pi times; the ramp between is linear in j, from whole j to whole j.
    """
    original = scaling.original_seq_len
    assert original is not None

    def pair_turning(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_turning(scaling.beta_fast or 32.0)), 0)
    last = min(math.ceil(pair_turning(scaling.beta_slow or 1.0)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    # A ramp of no width is a step.
    return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)


def _llama3_kept(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """1 for wavelengths below original / high_freq_factor, 0 above original / low_freq_factor, linear in the turns."""
    original = scaling.original_seq_len
    assert original is not None
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    turns = original * plain / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)
