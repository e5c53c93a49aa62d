"""Mixture keys inside a Triton kernel: sum_r pi_r phi(k_r) of a position whose keys lie beside each other.

See `megakernel.ops.mixture`. KEYS is the number of keys of a position; 0 says that it has one and no prior, and leaves
of these functions what `features` has.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, phi, store_gradient


@triton.jit
def phi_of_keys(
    k,
    stride,
    count,
    matrix,
    low,
    priors,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    PHI: tl.constexpr,
):
    """`features.phi` of C positions at `k`: of their key, or the mixture of their KEYS with the shares at `priors`.

    The log scale of a mixture is the largest one of its keys; a key of no share does not set it.
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
    """exp(own - logs), (C,), the scales of a key in mixtures of log scales `logs`; 0 for a key of no share."""
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
    """`features.store_gradient` of C positions at `k`, given the gradients in what `phi_of_keys` gave, with its logs.

    dk holds rows of KEYS D numbers; dy of key r is r * `pack_keys` further on. dpriors gets KEYS numbers of each
    position, its part of the gradients of the priors.
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
