"""Mean squared error of kernel estimates by random features: *Learning the Transformer Kernel*, theorem 3.

Frequencies omega_c = mu_c + S_c^T n of C Gaussians share one noise n ~ N(0, I) (eqs. 5 and 10), covariance
S_c^T S_c. The estimators are means over M draws of n of

    RKS  sum_c cos(omega_c.(q - k))                        PRF  sum_c exp(omega_c.(q + k) - |q|^2 - |k|^2)

and the closed forms below hold for any C. Theorem 3 is C = 2 with +-mu and one S for RKS, C = 1 for PRF. As printed
it needs two corrections, which the tests show against measured errors:

* both formulas take |S^T p|; covariance S^T S, as the theorem states it, makes it |S p|, p = k - q;
* eq. 14 has exp(2 |S^T o|) - exp(|S^T o|), o = k + q, where the norms must be squared (so do eqs. 45 and 46; the
  last line of eq. 44 squares the exponential instead of the bracket).

With |S p|^2, eq. 13 is right: 2/m cos^2(mu.p) (1 - exp(-|S p|^2))^2, at most 2/m.

Arguments everywhere: means (C, d); factors (C, d, d), the S_c; q and k (..., d), already scaled by d^-1/4. Results have
the leading shape of q and k.
"""

import torch
from torch import Tensor


def rks_kernel(means: Tensor, factors: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mean of the RKS estimator, sum_c exp(-|S_c p|^2 / 2) cos(mu_c.p)."""
    shift, spread = _along(means, factors, q - k)
    return (torch.exp(-spread.square().sum(-1) / 2) * shift.cos()).sum(-1)


def rks_error(means: Tensor, factors: Tensor, q: Tensor, k: Tensor, samples: int) -> Tensor:
    """The mean squared error of the RKS estimator with M = `samples`."""
    shift, spread = _along(means, factors, q - k)
    # cos a cos b is half of cos(a + b) + cos(a - b), and a +- b is again Gaussian.
    second_moment = (_mean_cosines(shift, spread, 1) + _mean_cosines(shift, spread, -1)) / 2
    return (second_moment - rks_kernel(means, factors, q, k).square()) / samples


def _mean_cosines(shift: Tensor, spread: Tensor, sign: int) -> Tensor:
    """The sum over pairs of components of the mean of cos(a +- b)."""
    widths = _pairs(spread, sign).square().sum(-1)
    return (torch.exp(-widths / 2) * _pairs(shift[..., None], sign)[..., 0].cos()).sum((-1, -2))


def prf_kernel(means: Tensor, factors: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mean of the PRF estimator, exp(-|q|^2 - |k|^2) sum_c exp(mu_c.o + |S_c o|^2 / 2)."""
    shift, spread = _along(means, factors, q + k)
    return (torch.exp(shift + spread.square().sum(-1) / 2)).sum(-1) * _damping(q, k)


def prf_error(means: Tensor, factors: Tensor, q: Tensor, k: Tensor, samples: int) -> Tensor:
    """The mean squared error of the PRF estimator with M = `samples`; no bound holds for it."""
    shift, spread = _along(means, factors, q + k)
    logs = _pairs(shift[..., None], 1)[..., 0] + _pairs(spread, 1).square().sum(-1) / 2
    second_moment = torch.exp(logs).sum((-1, -2)) * _damping(q, k).square()
    return (second_moment - prf_kernel(means, factors, q, k).square()) / samples


def _along(means: Tensor, factors: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """omega_c.x = shift_c + n.spread_c: mu_c.x (..., C) and S_c x (..., C, d)."""
    return x @ means.T, torch.einsum("cij,...j->...ci", factors, x)


def _pairs(x: Tensor, sign: int) -> Tensor:
    """x_c + sign x_c' for all pairs of components: (..., C, d) to (..., C, C, d)."""
    return x[..., :, None, :] + sign * x[..., None, :, :]


def _damping(q: Tensor, k: Tensor) -> Tensor:
    return torch.exp(-q.square().sum(-1) - k.square().sum(-1))
