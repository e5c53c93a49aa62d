"""The analyses: what each shows, where a paper shows it, and which runs it says something about. Loads no torch."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megakernel.config import Attention, Config, UserError

from .table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .subject import Subject


@dataclass(frozen=True)
class Analysis:
    """One analysis; the module of its name has `measure` and `draw`."""

    name: str
    shows: str
    """What, in one line."""

    source: str
    """The paper and its figure or table; empty for what is ours."""

    value: str
    """The column whose smallest, mean and largest number are printed; empty where these say nothing."""

    by: tuple[str, ...]
    """Columns that divide the rows for that."""

    needs: str = ""
    """What a layer has to have, to read on from `no layer has a`; empty where every layer has it."""

    fits: Callable[[Attention], bool] = lambda form: True
    """Whether a layer of this attention has it."""

    def measure(self, subject: "Subject") -> list[Row]:
        """Its rows."""
        return self._module.measure(subject)

    def draw(self, rows: Sequence[Row]) -> "Mapping[str, Figure]":
        """Its plots, from the rows alone: name -> figure."""
        return self._module.draw(rows)

    def applies(self, config: Config) -> bool:
        """Whether a layer of the run has what it needs."""
        model = config.model
        return any(self.fits(model.layer_attention(layer)) for layer in range(model.num_layers))

    @property
    def _module(self) -> Any:
        return importlib.import_module(f"{__package__}.{self.name}")


def _has_covariance(form: Attention) -> bool:
    return form.feature_map is not None and form.feature_map.is_gmm


def _has_noisy_kernel(form: Attention) -> bool:
    phi = form.feature_map
    of_tokens = form.compression is None or form.near is not None
    return phi is not None and phi.redraw_interval > 0 and of_tokens and form.keys_per_head == 1


def _has_gate(form: Attention) -> bool:
    near = form.near
    joins = near is not None and near.kind == "softmax" and near.join == "gated"
    return joins and form.compression is not None


def _has_priors(form: Attention) -> bool:
    return form.mixture is not None and form.mixture.estep == "soft"


def _keeps_tokens(form: Attention) -> bool:
    return not form.compresses_input and form.keys_per_head == 1


_KL = "Learning the Transformer Kernel"
_HEADS = ("layer", "head")

_ALL = (
    Analysis(
        "attention",
        "attention matrices of one sample, as images",
        "Transformer-MGK, figures 2, 6, 9",
        "",
        (),
    ),
    Analysis(
        "singular_values",
        "singular values of attention matrices and of outputs",
        "FLuRKA, figure 1; Skyformer, figure 4",
        "value",
        ("of", *_HEADS),
    ),
    Analysis(
        "ranks",
        "ranks of attention matrices over samples and heads",
        "Transformer-MGK, figures 2, 7; FLuRKA, figure 1",
        "rank",
        _HEADS,
    ),
    Analysis(
        "span", "attention span, and weight far away and beyond the near window", "", "span", ("layer",)
    ),
    Analysis(
        "gates",
        "how gates divide queries between near and far",
        "",
        "gate",
        ("layer",),
        "gate between a near window and landmarks (near: {join: gated})",
        _has_gate,
    ),
    Analysis(
        "covariances",
        "eigenvalues of learned covariances",
        f"{_KL}, tables 4, 9-12",
        "eigenvalue",
        _HEADS,
        "learned Gaussian mixture (gmm_rks, gmm_prf)",
        _has_covariance,
    ),
    Analysis(
        "kernel_deviation",
        "relative standard deviation of kernel estimates over draws",
        f"{_KL}, section 4.1",
        "deviation",
        _HEADS,
        "feature map of tokens with noise that training redraws",
        _has_noisy_kernel,
    ),
    Analysis(
        "voting",
        "inconsistency of predictions over draws, and the gain of a vote",
        f"{_KL}, figure 5",
        "voting_accuracy",
        ("draws",),
        "source of noise that training redraws",
        lambda form: form.redraws,
    ),
    Analysis(
        "gradients",
        "deviation and size of the head's gradients over draws",
        f"{_KL}, table 14",
        "deviation",
        (),
        "source of noise that training redraws",
        lambda form: form.redraws,
    ),
    Analysis(
        "spectral_error",
        "error of approximations of softmax on the run's queries and keys",
        "Skyformer, figure 1",
        "error",
        ("weights", "mechanism", "features"),
        "key of its own for every token",
        _keeps_tokens,
    ),
    Analysis(
        "instability",
        "instability over 20 steps from initial weights, over that of softmax",
        "Skyformer, table 3",
        "ratio",
        ("mechanism",),
    ),
    Analysis(
        "mixing",
        "mixing coefficients of mixture keys",
        "Transformer-MGK, table 8",
        "pi",
        ("layer", "key"),
        "mixture of keys with priors (estep: soft)",
        _has_priors,
    ),
    Analysis(
        "query_likelihood",
        "likelihood of queries under the Gaussians around keys",
        "Transformer-MGK, section 4",
        "nll",
        ("layer",),
        "weight for every pair under softmax or gaussian similarity",
        lambda form: form.weighs_every_pair,
    ),
    Analysis(
        "mixture_costs",
        "operations and parameters of mixture keys over softmax's",
        "Transformer-MGK, figure 3",
        "operations",
        ("width",),
        "mixture of keys",
        lambda form: form.mixture is not None,
    ),
    Analysis(
        "claims",
        "where FLuRKA needs fewer operations than its parents",
        "FLuRKA, claims 1-3",
        "over_kernel",
        ("tokens",),
        "kernel over compressed keys (FLuRKA)",
        lambda form: form.similarity == "kernel" and form.compression is not None,
    ),
)

ANALYSES: dict[str, Analysis] = {analysis.name: analysis for analysis in _ALL}

ALL = "all"
"""Stands for every analysis that applies."""


def chosen(names: Sequence[str], config: Config, run: str) -> list[Analysis]:
    """The analyses of these names, in the order of ANALYSES, each once.

    Raises UserError for a name that is none, or that says nothing about the run.
    """
    applying = [analysis for analysis in _ALL if analysis.applies(config)]
    choice = ", ".join(analysis.name for analysis in applying)
    for name in names:
        if name == ALL:
            continue
        if name not in ANALYSES:
            raise UserError(f"--what {name} is no analysis; choose {ALL}, {choice}")
        analysis = ANALYSES[name]
        if analysis not in applying:
            raise UserError(f"--what {name}: no layer of {run} has a {analysis.needs}; choose {choice}")
    return applying if ALL in names else [analysis for analysis in applying if analysis.name in names]
