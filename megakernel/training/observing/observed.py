"""The output of a run besides numbers, and its steps: histograms, plots, samples, profiles."""

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

from .metrics_writer import Entry
from .model_histograms import ModelHistograms
from .profiler import Profiler

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Providers:
    """Functions of the packages above training, which training does not import."""

    make_model: Callable[[Config, Corpora, Ranks], MakeModel]
    """Returns the maker of the model for the run's objective. Raises UserError, alike on all ranks."""

    figures: "Callable[[LanguageModel, LayerInputs, bool], dict[str, Figure]]"
    """Plots of what attention layers make of the first sequence; called on all ranks, and drawn where it is told to."""

    sampler: Callable[[Config, Tokenizer], Callable[[LanguageModel], str]]
    """Returns a function that continues logging.sample_prompt with a model, in Markdown.

    Raises UserError for more tokens than the model has positions.
    """


class Observed:
    """Called on all ranks; what there is to write comes into entries, on rank 0.

    excluded: put around time that is no part of a step.
    Raises UserError for samples that the model has no positions for.
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
    def step(self, step: int, entry: Entry) -> Iterator[None]:
        """Around training step `step`, counted from 1."""
        with self._histograms.step(step, entry.histograms), self._profiler.step(step):
            yield

    def after_step(self, step: int, batches: Sequence[Batch], entry: Entry) -> None:
        """Draw what attention layers make of the first sequence of `batches`, in the steps that want it."""
        if self._plots_every is None or step % self._plots_every:
            return
        model = self._engine.engine.module
        assert isinstance(model, LanguageModel)
        with self._excluded():
            # The layers of all ranks work together; one of them draws.
            inputs = model_inputs(batches[:1], self._mesh)[0]
            entry.figures |= self._figures(model, inputs, self._mesh.rank == 0)

    def evaluated(self, entry: Entry) -> None:
        """Let the model write, after an evaluation."""
        if self._sample is not None and self._mesh.rank == 0:
            model = self._engine.engine.module
            assert isinstance(model, LanguageModel)
            with self._excluded():
                entry.texts["samples"] = self._sample(model)
