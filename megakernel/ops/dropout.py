"""Dropout whose masks are functions of numbers of the tokens: no random state, and nothing but those is kept.

A counter-based generator: splitmix64's finalizer of a counter, in integer arithmetic that is exact on every device.
The 64 bits of a hash decide four neighboring channels, 16 bits each, so probabilities are multiples of 2^-16.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor

_WEYL = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""Constants of splitmix64, as int64."""

_LANES = 4
"""Channels per hash."""

_LEVELS = 2**16
"""Values of a channel's 16 bits."""

_TOKENS = 2**40
"""Places of a sequence's tokens in the counter."""

_HASHES_AT_ONCE = 2**21
"""Hashes, 8 bytes each and as many again for intermediate results, that exist at once."""


def stream_of(*place: int | str) -> int:
    """An int64 that identifies a place, such as a dropout of a layer, or a step of a seed."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def token_numbers(
    stream: int,
    first_sequence: int,
    sequences: int,
    first_token: int,
    tokens: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """A random number, (sequences, tokens) int64, of each token; a function of the stream and the token's place.

    Args:
        stream: of the seed and the step, from `stream_of`.
        first_sequence: index of the first sequence in the global batch.
        sequences: B.
        first_token: index in its sequence of the first token here.
        tokens: N.
        device: of the result.
    """
    rows = torch.arange(first_sequence, first_sequence + sequences, device=device)
    columns = torch.arange(first_token, first_token + tokens, device=device)
    return _hashed((rows[:, None] * _TOKENS + columns) * _WEYL + stream)


def dropout(x: Tensor, numbers: Tensor, probability: float, stream: int, first_channel: int = 0) -> Tensor:
    """x with each number set to 0 with a probability p, and otherwise divided by 1 - p; backward has the same mask.

    The mask of a token's channel is a function of the token's number, the stream and the channel, and is computed again
    in backward: autograd keeps `numbers` alone, which all dropouts of a micro-batch share.

    Args:
        x: (..., C).
        numbers: (...) int64, from `token_numbers`.
        probability: p, in (0, 1), rounded to a multiple of 2^-16, but to neither 0 nor 1.
        stream: of this dropout, from `stream_of`.
        first_channel: index of the first channel here, where several ranks share the channels.

    Returns:
        (..., C) in the dtype of x.
    """
    dropped = min(max(round(probability * _LEVELS), 1), _LEVELS - 1)
    return _Dropout.apply(x, numbers, dropped, stream, first_channel)


class _Dropout(torch.autograd.Function):
    """dropped: of the 2^16 values of a channel's bits, how many drop it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, numbers: Tensor, dropped: int, stream: int, first_channel: int
    ) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.mask = dropped, stream, first_channel
        out = torch.empty_like(x)
        hashes_of_row = max(numbers[:1].numel() * x.shape[-1] // _LANES, 1)
        rows = max(_HASHES_AT_ONCE // hashes_of_row, 1)
        for source, target, part in zip(x.split(rows), out.split(rows), numbers.split(rows)):
            torch.mul(source, _kept(part, x.shape[-1], *ctx.mask), out=target)
            target *= _LEVELS / (_LEVELS - dropped)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (numbers,) = ctx.saved_tensors
        return _Dropout.apply(grads[0], numbers, *ctx.mask), None, None, None, None


def _kept(numbers: Tensor, channels: int, dropped: int, stream: int, first_channel: int) -> Tensor:
    """(..., channels) bool: which channels of the tokens with these numbers are kept."""
    first, skipped = divmod(first_channel, _LANES)
    groups = torch.arange(first, first - (-(skipped + channels) // _LANES), device=numbers.device)
    bits = _hashed(numbers[..., None] + (groups * _WEYL + stream)).view(torch.int16)
    return bits[..., skipped : skipped + channels] >= dropped - _LEVELS // 2


def _hashed(counter: Tensor) -> Tensor:
    """splitmix64's finalizer of int64 counters, in place."""
    for shift, factor in zip((30, 27), _FACTORS):
        counter.bitwise_xor_(_shifted(counter, shift)).mul_(factor)
    return counter.bitwise_xor_(_shifted(counter, 31))


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """A logical shift to the right; torch's repeats the sign."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
