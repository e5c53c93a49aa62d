"""Mixture keys inside Triton kernels: sum_r pi_r phi(k_r) over the adjacent keys of a position.

See `megakernel.ops.mixture`. KEYS is the number of keys per position; with 0, there is one key without a prior, and
these functions reduce to those of `features`.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.feature_maps import phi, store_dx_from_dphi
from megakernel.ops.kernels.primitives import EMPTY


@triton.jit
def phi_of_keys(
    k, stride, num_valid, matrix, low, priors, KEYS: tl.constexpr, C: tl.constexpr, PHI: tl.constexpr
):
    """`feature_maps.phi` of the keys of C positions at `k`, or of mixtures of their KEYS keys with weights `priors`.

    The log scale of a mixture is the largest of its keys with a nonzero prior.
    """
    MP: tl.constexpr = PHI.padded_rows
    if KEYS == 0:
        phi1, phi2, logs = phi(k, stride, num_valid, matrix, low, C, PHI)
    else:
        phi1 = tl.zeros((C, MP), tl.float32)
        phi2 = phi1
        logs = tl.zeros((C,), tl.float32) + (EMPTY if PHI.unbounded else 0.0)
        for r in range(KEYS):
            prior = tl.load(priors + r)
            k_phi1, k_phi2, k_log_scale = phi(k + r * PHI.width, stride, num_valid, matrix, low, C, PHI)
            if PHI.unbounded:
                new_max = tl.maximum(logs, tl.where(prior > 0, k_log_scale, EMPTY))
                phi1 = (
                    phi1 * tl.exp(logs - new_max)[:, None]
                    + k_phi1 * (prior * scales_of_key(prior, k_log_scale, new_max))[:, None]
                )
                logs = new_max
            else:
                phi1 += k_phi1 * prior
                if PHI.has_two_halves:
                    phi2 += k_phi2 * prior
        if not PHI.has_two_halves:
            phi2 = phi1
    return phi1, phi2, logs


@triton.jit
def scales_of_key(prior, k_log_scale, logs):
    """exp(k_log_scale - logs), (C,): a key's scale relative to mixtures of log scales `logs`; 0 if its prior is 0."""
    return tl.where(prior > 0, tl.exp(tl.minimum(k_log_scale - logs, 0.0)), 0.0)


@triton.jit
def store_dx_of_keys(
    k,
    stride,
    num_valid,
    matrix,
    low,
    priors,
    logs,
    dphi1,
    dphi2,
    dk,
    dk_row,
    p_dproj,
    pack_keys,
    dpriors,
    KEYS: tl.constexpr,
    C: tl.constexpr,
    LEARNED: tl.constexpr,
    PHI: tl.constexpr,
):
    """`features.store_dx_from_dphi` for C positions at `k`, from gradients of `phi_of_keys`' features, and its logs.

    dk has rows of KEYS D elements, `dk_row` apart; `pack_keys` is the stride in p_dproj from one key to the next. In
    dpriors a position has KEYS elements, its part of the gradients of the priors.
    """
    for r in range(KEYS):
        prior = tl.load(priors + r)
        phi1, phi2, k_log_scale = phi(k + r * PHI.width, stride, num_valid, matrix, low, C, PHI)
        dphi_dot_phi = tl.sum(phi1 * dphi1, 1)
        if PHI.has_two_halves:
            dphi_dot_phi += tl.sum(phi2 * dphi2, 1)
        factors = tl.zeros((C,), tl.float32) + prior
        if PHI.unbounded:
            relative_scale = scales_of_key(prior, k_log_scale, logs)
            factors *= relative_scale
            dphi_dot_phi *= relative_scale
        position = tl.arange(0, C)
        tl.store(dpriors + position * KEYS + r, dphi_dot_phi, mask=position < num_valid)
        store_dx_from_dphi(
            k + r * PHI.width,
            stride,
            num_valid,
            matrix,
            phi1,
            phi2,
            dphi1 * factors[:, None],
            dphi2 * factors[:, None],
            dk + r * PHI.width,
            dk_row,
            None if p_dproj is None else p_dproj + r * pack_keys,
            C,
            LEARNED,
            PHI,
        )
