"""Mixture keys inside Triton kernels: sum_r pi_r phi(k_r) over the adjacent keys of a position.

See `megakernel.ops.mixture`. KEYS is the number of keys per position; with 0, there is one key without a prior, and
these functions reduce to those of `features`.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, phi, store_gradient


@triton.jit
def phi_of_keys(
    k, stride, count, matrix, low, priors, KEYS: tl.constexpr, C: tl.constexpr, PHI: tl.constexpr
):
    """`features.phi` of the keys of C positions at `k`, or of the mixtures of their KEYS keys with weights `priors`.

    The log scale of a mixture is the largest of its keys with a nonzero prior.
    """
    MP: tl.constexpr = PHI.padded_rows
    if KEYS == 0:
        a, b, logs = phi(k, stride, count, matrix, low, C, PHI)
    else:
        a = tl.zeros((C, MP), tl.float32)
        b = a
        logs = tl.zeros((C,), tl.float32) + (EMPTY if PHI.unbounded else 0.0)
        for r in range(KEYS):
            share = tl.load(priors + r)
            x, y, own = phi(k + r * PHI.width, stride, count, matrix, low, C, PHI)
            if PHI.unbounded:
                larger = tl.maximum(logs, tl.where(share > 0, own, EMPTY))
                a = (
                    a * tl.exp(logs - larger)[:, None]
                    + x * (share * scales_of_key(share, own, larger))[:, None]
                )
                logs = larger
            else:
                a += x * share
                if PHI.two:
                    b += y * share
        if not PHI.two:
            b = a
    return a, b, logs


@triton.jit
def scales_of_key(share, own, logs):
    """exp(own - logs), (C,): a key's scale relative to mixtures of log scales `logs`; 0 if its prior is 0."""
    return tl.where(share > 0, tl.exp(tl.minimum(own - logs, 0.0)), 0.0)


@triton.jit
def store_gradients_of_keys(
    k,
    stride,
    count,
    matrix,
    low,
    priors,
    logs,
    grad_a,
    grad_b,
    dk,
    dy,
    pack_keys,
    dpriors,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    LEARNED: tl.constexpr,
    PHI: tl.constexpr,
):
    """`features.store_gradient` for C positions at `k`, given gradients of the results of `phi_of_keys` and its logs.

    dk has rows of KEYS D elements; `pack_keys` is the stride in dy from one key to the next. dpriors gets KEYS elements
    per position, its part of the gradients of the priors.
    """
    for r in range(KEYS):
        share = tl.load(priors + r)
        a, b, own = phi(k + r * PHI.width, stride, count, matrix, low, C, PHI)
        along = tl.sum(a * grad_a, 1)
        if PHI.two:
            along += tl.sum(b * grad_b, 1)
        factors = tl.zeros((C,), tl.float32) + share
        if PHI.unbounded:
            scales = scales_of_key(share, own, logs)
            factors *= scales
            along *= scales
        position = tl.arange(0, C)
        tl.store(dpriors + position * KEYS + r, along, mask=position < count)
        store_gradient(
            k + r * PHI.width,
            stride,
            count,
            matrix,
            a,
            b,
            grad_a * factors[:, None],
            grad_b * factors[:, None],
            dk + r * PHI.width,
            None if dy is None else dy + r * pack_keys,
            C,
            LEARNED,
            PHI,
            ROW=KEYS * PHI.width,
        )
