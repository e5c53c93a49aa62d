"""A whole run of one process, from joining the others to leaving them."""

from megakernel.config import Config
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.processes import ProcessEnvironment

from .trainer import Trainer


def pretrain(config: Config, process: ProcessEnvironment) -> int:
    """Train until the last step or a request to stop; returns the exit status (0, 85 or 143).

    Raises UserError for what the user can mend.
    """
    device = prepare_device(config.training.device, process.local_rank)
    mesh = Mesh.create(config.parallel, process, device)
    try:
        return Trainer(config, mesh).run().exit_status
    finally:
        mesh.destroy()
