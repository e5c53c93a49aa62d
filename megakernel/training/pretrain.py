"""A whole run of one process, from joining the others to leaving them."""

import socket
from contextlib import suppress
from pathlib import Path

from megakernel.config import Config, RunFailed, UserError
from megakernel.parallel.processes import ProcessEnvironment

from . import events


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
    except (UserError, RunFailed) as error:  # raised alike on all ranks
        if process.rank == 0 and (isinstance(error, RunFailed) or events.in_job()):
            _record_failure(config.run.folder, process.rank, str(error))
        mesh.destroy()
        raise
    except Exception as error:
        # This rank's own: leaving the groups would make the others fail first and hide the cause.
        _record_failure(config.run.folder, process.rank, f"{type(error).__name__}: {error}")
        raise
    mesh.destroy()
    return status


def _record_failure(run: Path, rank: int, why: str) -> None:
    with suppress(OSError):  # the disk may be what has failed
        events.record(run, "failed", rank=rank, host=socket.gethostname(), why=" ".join(why.split())[:300])
