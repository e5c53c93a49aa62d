"""Mixing coefficients pi of mixture keys, per layer and head (Transformer-MGK, table 8)."""

from megakernel.attention.mixture import KeyMixture
from megakernel.model.layer import attention_cores

from .subject import Subject
from .table import Row


def measure(subject: Subject) -> list[Row]:
    """layer, head, key, pi."""
    return [
        {"layer": layer, "head": head, "key": key, "pi": value}
        for layer, core in attention_cores(subject.model).items()
        for mixture in core.modules()
        if isinstance(mixture, KeyMixture) and mixture.soft
        for head, of_head in enumerate(mixture.priors().tolist())
        for key, value in enumerate(of_head)
    ]
