"""The analyses: what each shows, its source in a paper, and the runs to which it applies. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from megakernel.config import Attention, Config, UserError

from .table import Plot, Row

if TYPE_CHECKING:
    from .subject import Subject


@dataclass(frozen=True)
class Analysis:
    """One analysis."""

    function: str
    """MODULE.NAME of a function `measure_NAME(subject) -> rows`; the module's path is one below `megakernel`."""

    shows: str
    """One line about the result."""

    source: str
    """The paper and its figure or table; empty for our own analyses."""

    plots: Sequence[Plot]

    value: str = ""
    """The column whose minimum, mean and maximum are printed; empty: none."""

    by: tuple[str, ...] = ()
    """Columns by which rows are grouped for that."""

    needs: str = ""
    """What a layer must have, to continue the sentence `no layer has a`; empty if every layer has it."""

    fits: Callable[[Attention], bool] = lambda attention: True
    """Whether a layer with this attention has it."""

    also: tuple[str, ...] = ()
    """Further columns that are printed like `value`."""

    needs_classes: bool = False
    """Whether the model must predict classes (of tokens or documents), and not numbers."""

    @property
    def name(self) -> str:
        """Name for `--what`."""
        return self.function.rpartition(".")[2]

    def measure(self, subject: "Subject") -> Sequence[Row]:
        """Run the analysis and return its rows."""
        module, _, name = self.function.rpartition(".")
        rows: Sequence[Row] = getattr(import_module(f"megakernel.{module}"), f"measure_{name}")(subject)
        return rows

    def missing(self, config: Config, run: str) -> str | None:
        """Why the analysis does not apply to `run`; None if it does."""
        classifier = config.model.classifier
        if not any(map(self.fits, config.model.attentions)):
            return f"no layer of {run} has a {self.needs}"
        if self.needs_classes and classifier is not None and classifier.num_classes == 1:
            return f"{run} predicts numbers, not classes"
        return None


def _has_noisy_kernel(attention: Attention) -> bool:
    phi = attention.feature_map
    of_tokens = attention.compression is None or attention.near is not None
    return phi is not None and phi.redraw_interval > 0 and of_tokens and attention.keys_per_head == 1


def _has_gate(attention: Attention) -> bool:
    near = attention.near
    joins = near is not None and near.kind == "softmax" and near.join == "gated"
    return joins and attention.compression is not None


def _has_keys_of_tokens(attention: Attention) -> bool:
    return not attention.compresses_input and not attention.spec.keys_are_queries


def _has_a_key_per_token(attention: Attention) -> bool:
    return _has_keys_of_tokens(attention) and attention.keys_per_head == 1


_KL = "Learning the Transformer Kernel"
_HEADS = ("layer", "head")
_REACHES = ("span", "beyond_16", "beyond_64", "beyond_256", "far_mass")
_NOISE = "source of noise that training redraws"


_ALL = (
    Analysis(
        "analysis.plots.matrices.attention",
        "attention matrices of one sample, as images",
        "Transformer-MGK, figures 2, 6, 9",
        [
            Plot(
                *("cells", "", "key", "query", "weight", "head"),
                each="layer",
                downwards=True,
                decades=4,
                scale=(0, 1),
            )
        ],
    ),
    Analysis(
        "analysis.plots.spectra.singular_values",
        "singular values of attention matrices and of outputs",
        "FLuRKA, figure 1; Skyformer, figure 4",
        [Plot("lines", "", "index", "value", "head", "layer", each="of", log_y=True)],
        "value",
        ("of", *_HEADS),
    ),
    Analysis(
        "analysis.plots.spectra.ranks",
        "ranks of attention matrices over samples and heads",
        "Transformer-MGK, figures 2, 7; FLuRKA, figure 1",
        [Plot("distributions", name, name, "layer") for name in ("rank", "stable_rank")],
        "rank",
        _HEADS,
    ),
    Analysis(
        "analysis.plots.reach.span",
        "attention span, and weight far away and beyond the near window",
        "",
        [
            Plot("cells", name, "head", "layer", name, scale=None if name == "span" else (0, 1))
            for name in _REACHES
        ],
        "span",
        ("layer",),
    ),
    Analysis(
        "analysis.plots.reach.gates",
        "how gates divide queries between near and far",
        "",
        [Plot("lines", "histogram", "near", "share", "head", "layer", steps=True)],
        "gate",
        ("layer",),
        "gate between a near window and landmarks (near: {join: gated})",
        _has_gate,
    ),
    Analysis(
        "analysis.plots.choices.choices",
        "what chosen blocks hold of the weight that softmax has far away",
        "",
        [Plot("cells", name, "head", "layer", name) for name in ("found", "distance", "repeated")],
        "found",
        ("layer",),
        "choice of blocks (selection)",
        lambda attention: attention.selection is not None,
    ),
    Analysis(
        "analysis.plots.spectra.covariances",
        "eigenvalues of learned covariances",
        f"{_KL}, tables 4, 9-12",
        [Plot("lines", "eigenvalues", "index", "eigenvalue", "head", "layer", log_y=True)],
        "eigenvalue",
        _HEADS,
        "learned Gaussian mixture (gmm_rks, gmm_prf)",
        lambda attention: attention.feature_map is not None and attention.feature_map.kind == "gmm",
    ),
    Analysis(
        "papers.learned_kernels.noise.kernel_deviation",
        "relative standard deviation of kernel estimates over draws",
        f"{_KL}, section 4.1",
        [Plot("cells", "deviation", "head", "layer", "deviation", first="sample")],
        "deviation",
        _HEADS,
        "feature map of tokens with noise that training redraws",
        _has_noisy_kernel,
    ),
    Analysis(
        "papers.learned_kernels.noise.voting",
        "inconsistency of predictions over draws, and the gain of a vote",
        f"{_KL}, figure 5",
        [
            Plot("lines", "accuracy", "draws", "voting_accuracy", log_x=True),
            Plot("lines", "loss", "draws", "loss", log_x=True),
        ],
        "voting_accuracy",
        ("draws",),
        _NOISE,
        lambda attention: attention.redraws,
        needs_classes=True,
    ),
    Analysis(
        "papers.learned_kernels.noise.gradients",
        "deviation and size of the head's gradients over draws",
        f"{_KL}, table 14",
        [Plot("distributions", name, name) for name in ("deviation", "absolute_mean")],
        "deviation",
        (),
        _NOISE,
        lambda attention: attention.redraws,
        ("absolute_mean",),
    ),
    Analysis(
        "papers.skyformer.measurements.spectral_error",
        "error of approximations of softmax on the run's queries and keys",
        "Skyformer, figure 1",
        [
            Plot(
                "lines",
                "",
                "features",
                "error",
                "mechanism",
                "length",
                each="weights",
                log_x=True,
                log_y=True,
            )
        ],
        "error",
        ("weights", "mechanism", "features"),
        "separate key for every token",
        _has_a_key_per_token,
    ),
    Analysis(
        "papers.skyformer.statistical_dimension.statistical_dimension",
        "statistical dimension of Gaussian kernels of the run's queries and keys: how many landmarks they need",
        "Skyformer, theorem 2",
        [
            Plot("lines", name, "epsilon", name, "head", "layer", log_x=True)
            for name in ("dimension", "uniform")
        ],
        "dimension",
        ("epsilon", *_HEADS),
        "separate key for every token",
        _has_a_key_per_token,
    ),
    Analysis(
        "papers.skyformer.measurements.instability",
        "instability over 20 steps from initial weights, relative to that of softmax",
        "Skyformer, table 3",
        [Plot("lines", "ratio", "step", "ratio", "mechanism", log_y=True, means=True)],
        "ratio",
        ("mechanism",),
    ),
    Analysis(
        "papers.mixture_keys.mixtures.mixing",
        "mixing coefficients of mixture keys",
        "Transformer-MGK, table 8",
        [Plot("cells", "pi", "key", "head", "pi", "layer")],
        "pi",
        ("layer", "key"),
        "mixture of keys with priors (estep: soft)",
        lambda attention: attention.mixture is not None and attention.mixture.estep == "soft",
    ),
    Analysis(
        "papers.mixture_keys.mixtures.query_likelihood",
        "likelihood of queries under the Gaussians around keys",
        "Transformer-MGK, section 4",
        [Plot("cells", "nll", "head", "layer", "nll", first="sample")],
        "nll",
        ("layer",),
        "weight for every pair under softmax or gaussian similarity",
        lambda attention: attention.weighs_every_pair,
    ),
    Analysis(
        "papers.mixture_keys.key_maps.key_weights",
        "weight matrices of keys, as heat maps",
        "Transformer-MGK, figure 13",
        [Plot("cells", "", "channel", "input", "weight", "matrix", each="layer", downwards=True)],
        "weight",
        ("layer", "matrix"),
        "projection of keys apart from that of queries",
        lambda attention: not attention.spec.keys_are_queries,
    ),
    Analysis(
        "papers.mixture_keys.key_maps.keys",
        "keys of the first 100 tokens of a sample, as heat maps",
        "Transformer-MGK, figure 14",
        [Plot("cells", "", "channel", "token", "value", "matrix", each="layer", downwards=True)],
        "value",
        ("layer", "matrix"),
        "key of its own for every token",
        _has_keys_of_tokens,
    ),
    Analysis(
        "papers.mixture_keys.costs.mixture_costs",
        "operations and parameters of mixture keys, relative to softmax",
        "Transformer-MGK, figure 3",
        [
            Plot("lines", "operations", "width", "operations", "tokens", log_x=True),
            Plot("lines", "parameters", "width", "parameters", log_x=True),
        ],
        "operations",
        ("width",),
        "mixture of keys",
        lambda attention: attention.mixture is not None,
    ),
    Analysis(
        "papers.flurka.flurka_error.flurka_error",
        "error of FLuRKA with untrained E and F, its two parts and their bound, on the run's queries and keys",
        "FLuRKA, theorem 1",
        [
            Plot("lines", name, "landmarks", name, "layer", each="weights", log_x=True, log_y=True)
            for name in ("error", "kernel_part", "low_rank_part")
        ],
        "error",
        ("weights", "landmarks"),
        "separate key for every token",
        _has_a_key_per_token,
    ),
    Analysis(
        "papers.flurka.claims.claims",
        "where FLuRKA needs fewer operations than its parents",
        "FLuRKA, claims 1-3",
        [Plot("cells", name, "tokens", "rank", name) for name in ("over_low_rank", "over_kernel", "claim_1")],
        "over_kernel",
        ("tokens",),
        "kernel over compressed keys (FLuRKA)",
        lambda attention: attention.similarity == "kernel" and attention.compression is not None,
    ),
)

ANALYSES: dict[str, Analysis] = {analysis.name: analysis for analysis in _ALL}

ALL = "all"
"""Stands for every analysis that applies."""


def select_analyses(names: Sequence[str], config: Config, run: str) -> list[Analysis]:
    """The analyses with these names, in the order of ANALYSES, each once.

    Raises UserError for an unknown name, or for an analysis that does not apply to the run.
    """
    if config.model.encoder is not None:
        raise UserError(
            f"model.kind=encoder_decoder of {run} has a source and a target, and analyses read one sequence; give a "
            "run of another kind"
        )
    missing = {name: analysis.missing(config, run) for name, analysis in ANALYSES.items()}
    applying = [analysis for name, analysis in ANALYSES.items() if missing[name] is None]
    choice = ", ".join(analysis.name for analysis in applying)
    for name in names:
        if name == ALL:
            continue
        if name not in ANALYSES:
            raise UserError(f"--what {name} is no analysis; choose {ALL}, {choice}")
        if reason := missing[name]:
            raise UserError(f"--what {name}: {reason}; choose {choice}")
    return applying if ALL in names else [analysis for analysis in applying if analysis.name in names]
