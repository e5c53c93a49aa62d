"""Simple gated linear attention: a state that decays, by a factor that each token names."""

from pydantic import Field

from .section import Section


class SimpleGla(Section):
    """S_i = a_i S_(i-1) + k_i v_i^T and o_i = q_i^T S_i / sqrt(d), with one factor a_i in (0, 1) for each key head."""

    gate_logit_normalizer: float = Field(default=16.0, gt=0)
    """log a_i = log sigmoid(w.x_i + b) divided by this: larger numbers forget more slowly."""
