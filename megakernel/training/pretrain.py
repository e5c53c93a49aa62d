"""A whole run of one process, from joining the others to leaving them."""

from megakernel.config import Config, RunFailed, UserError
from megakernel.parallel.processes import ProcessEnvironment


def pretrain(config: Config, process: ProcessEnvironment) -> int:
    """Train until the last step or a request to stop; returns the exit status (0, 85 or 143).

    Raises UserError for what the user can mend.
    """
    from megakernel.parallel import prepare_device

    device = prepare_device(config.training.device, process.local_rank)
    # Megatron-core and DeepSpeed choose their device when they are imported, so not before this line.
    from megakernel.parallel import Mesh
    from megakernel.training.trainer import Trainer

    mesh = Mesh.create(config.parallel, process, device)
    try:
        status = Trainer(config, mesh).run().exit_status
    except (UserError, RunFailed):  # raised alike on all ranks
        mesh.destroy()
        raise
    # Any other error is this rank's own: leaving the groups would make the others fail first and hide the cause.
    mesh.destroy()
    return status
