"""The output of a run besides scalars: histograms, plots, samples, profiles."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.tokenizers import Tokenizer
from megakernel.config import Config
from megakernel.model import LanguageModel
from megakernel.model.layer_inputs import LayerInputs
from megakernel.parallel.ranks import Ranks
from megakernel.training.engine import Engine, MakeModel, model_inputs

from .metrics_writer import StepMetrics
from .model_histograms import ModelHistograms
from .profiler import Profiler

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Providers:
    """Functions of higher packages, which training must not import."""

    make_model: Callable[[Config, Corpora, Ranks], MakeModel]
    """Returns the builder of the model for the run's objective. Raises UserError, alike on all ranks."""

    figures: "Callable[[LanguageModel, LayerInputs, bool], dict[str, Figure]]"
    """Plots of the attention layers for the first sequence; called on all ranks, drawn if the flag is set."""

    sampler: Callable[[Config, Tokenizer], Callable[[LanguageModel], str]]
    """Returns a function from a model to its continuation of logging.sample_prompt, in Markdown.

    Raises UserError if the sample is longer than the model's positions.
    """


class Observer:
    """Collects histograms, plots, samples and profiles; called on all ranks, fills entries on rank 0.

    excluded: context manager for time that is not part of a step.
    Raises UserError if samples are longer than the model's positions.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        corpora: Corpora,
        providers: Providers,
        profiler: Profiler,
        excluded: Callable[[], AbstractContextManager[None]],
    ):
        logging = config.logging
        self._engine = engine
        self._mesh = engine.mesh
        self._excluded = excluded
        self._profiler = profiler
        self._histograms = ModelHistograms(engine, logging.histograms_every, excluded)
        self._plots_every = logging.analysis_every
        self._figures = providers.figures
        wants_samples = logging.sample_prompt is not None
        self._sample = providers.sampler(config, corpora.tokenizer) if wants_samples else None

    @contextmanager
    def step(self, step: int, entry: StepMetrics) -> Iterator[None]:
        """Wraps training step `step`, counted from 1."""
        with self._histograms.step(step, entry.histograms), self._profiler.step(step):
            yield

    def after_step(self, step: int, batches: Sequence[Batch], entry: StepMetrics) -> None:
        """Plot the attention layers for the first sequence of `batches`, every logging.analysis_every steps."""
        if self._plots_every is None or step % self._plots_every:
            return
        model = self._engine.engine.module
        assert isinstance(model, LanguageModel)
        with self._excluded():
            # All ranks run the layers, one of them draws.
            inputs = model_inputs(batches[:1], self._mesh)[0]
            entry.figures |= self._figures(model, inputs, self._mesh.rank == 0)

    def after_evaluation(self, entry: StepMetrics) -> None:
        """Write a sample after an evaluation."""
        if self._sample is not None and self._mesh.rank == 0:
            model = self._engine.engine.module
            assert isinstance(model, LanguageModel)
            with self._excluded():
                entry.texts["samples"] = self._sample(model)
