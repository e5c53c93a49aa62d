"""Pretraining as one process of it."""

from megakernel.config import Config
from megakernel.parallel.processes import ProcessEnvironment

from .process import in_mesh


def pretrain(config: Config, process: ProcessEnvironment) -> int:
    """Train until the last step or a request to stop; returns the exit status (0, 85 or 143).

    Raises UserError for what the user can mend.
    """

    def work(mesh) -> int:
        from megakernel.training.trainer import Trainer

        return Trainer(config, mesh).run().exit_status

    return in_mesh(config, process, work)
