"""Pretraining and up-training as one process of them, with what a run takes from the rooms above training."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from megakernel.config import Config
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.training.process import in_mesh

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from data_pipeline.tokenizers import Tokenizer
    from megakernel.model import LanguageModel
    from megakernel.model.layer_inputs import LayerInputs
    from megakernel.training.observing.observed import Providers


def pretrain(config: Config, process: ProcessEnvironment) -> int:
    """Train until the last step or a request to stop; returns the exit status (0, 85 or 143).

    Raises UserError for what the user can mend.
    """

    def work(mesh) -> int:
        from megakernel.training.trainer import Trainer

        return Trainer(config, mesh, providers()).run().exit_status

    return in_mesh(config, process, work)


def uptrain(config: Config, process: ProcessEnvironment) -> int:
    """Go through the stages until the last is done or a request to stop; the exit status (0, 85 or 143).

    Raises UserError for what the user can mend.
    """

    def work(mesh) -> int:
        from megakernel.uptraining.run import Uptraining
        from megakernel.uptraining.stages import check_stages

        check_stages(config)
        return Uptraining(config, mesh, providers()).run()

    return in_mesh(config, process, work)


def providers() -> "Providers":
    """What trains by the objective section, plots attention and continues prompts; for processes of a mesh."""
    from megakernel.training.observing.observed import Providers
    from megakernel.uptraining.objectives import model_maker

    return Providers(model_maker, _attention_figures, _sampler)


def _attention_figures(model: "LanguageModel", inputs: "LayerInputs", draw: bool) -> "dict[str, Figure]":
    # Imported here because a run without plots needs no matplotlib.
    from megakernel.analysis.plots.live import attention_figures

    return attention_figures(model, inputs, draw=draw)


def _sampler(config: Config, tokenizer: "Tokenizer") -> "Callable[[LanguageModel], str]":
    from megakernel.generation import Samples

    return Samples(config, tokenizer).markdown
