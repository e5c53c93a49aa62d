"""What can be watched of a run depends on which process holds what of the model."""

from collections.abc import Iterator

from .errors import Problem
from .model import Model
from .parallel import Parallel
from .training import Logging


def processes_hold_what_is_watched(logging: Logging, model: Model, parallel: Parallel) -> Iterator[Problem]:
    """Samples take a process that holds the whole model, plots one that holds all its layers."""
    if logging.analysis_every is not None and parallel.pipeline > 1:
        reason = f"needs all layers in one process, and parallel.pipeline={parallel.pipeline} parts them"
        remedy = "remove it; `megakernel analyze RUN` takes checkpoints of every layout"
        yield Problem("logging.analysis_every", logging.analysis_every, reason, remedy)
    if logging.sample_prompt is None:
        return
    if not model.is_causal:
        reason = f"has nothing to continue it: model.kind is {model.kind}"
        yield Problem("logging.sample_prompt", logging.sample_prompt, reason, "remove it")
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "pipeline": parallel.pipeline}
    shared = [f"parallel.{key}={size}" for key, size in sizes.items() if size > 1]
    shared += ["parallel.zero_stage=3"] * (parallel.zero_stage == 3)
    if shared:
        reason = f"needs a process that holds the whole model, and {shared[0]} shares it"
        remedy = "remove it; `megakernel generate RUN` takes checkpoints of every layout"
        yield Problem("logging.sample_prompt", logging.sample_prompt, reason, remedy)
