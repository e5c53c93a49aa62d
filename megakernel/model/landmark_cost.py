"""Floating-point operations of attention through landmarks of whole rows, as `flops` counts them."""

from megakernel.config.landmark import Nystromformer, Skyformer

INVERSE_STEPS = 6
PRODUCTS_PER_STEP = 4


def skyformer_flops(form: Skyformer, head_dim: int, seq_len: int) -> dict[str, float]:
    """Forward FLOPs per token of one query head; of the exact inverse, which is for measurements, the products alone.

    Distances are counted as the products that they are made of.
    """
    return _through_landmarks(form.features, head_dim, seq_len, form.inverse == "iterative")


def nystromformer_flops(form: Nystromformer, head_dim: int, seq_len: int) -> dict[str, float]:
    """Forward FLOPs per token of one query head; the means are sums of tokens, no products."""
    parts = _through_landmarks(form.landmarks, head_dim, seq_len, iterative=True)
    if form.conv_kernel is not None:
        parts["convolution"] = 2 * form.conv_kernel * head_dim
    return parts


def _through_landmarks(count: int, size: int, seq_len: int, iterative: bool) -> dict[str, float]:
    inverse = INVERSE_STEPS * PRODUCTS_PER_STEP * 2 * count**3 if iterative else 0
    between = 2 * count * count * size
    return {
        # Queries and keys meet the landmarks; values go to them and come back.
        "landmarks": 2 * 2 * count * size,
        "readout": 2 * 2 * count * size,
        # Landmarks meet each other, and the inverse is applied to what they hold.
        "inverse": (2 * between + inverse) / seq_len,
    }
