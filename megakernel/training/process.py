"""One process's part of a job, from joining the others to leaving them."""

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel.config import Config, RunFailed, UserError
from megakernel.parallel.processes import ProcessEnvironment

from . import events

if TYPE_CHECKING:
    from megakernel.parallel import Mesh


def in_mesh(config: Config, process: ProcessEnvironment, work: "Callable[[Mesh], int]") -> int:
    """Join the processes of the job, do `work` with them and leave; what `work` returns.

    work imports what needs Megatron-core and DeepSpeed by itself: they choose their device when they are imported.
    """
    mesh = None
    try:
        from megakernel.parallel import prepare_device

        device = prepare_device(config.training.device, process.local_rank)
        from megakernel.parallel import Mesh

        mesh = Mesh.create(config.parallel, process, device)
        status = work(mesh)
    except (UserError, RunFailed) as error:
        # Raised alike on all ranks, once they have met.
        tells = process.rank == 0 or mesh is None
        if tells and (isinstance(error, RunFailed) or events.in_job()):
            _record_failure(config.run.folder, process.rank, str(error))
        if mesh is not None:
            mesh.destroy()
        raise
    except Exception as error:
        # This rank's own: leaving the groups would make the others fail first and hide the cause.
        _record_failure(config.run.folder, process.rank, f"{type(error).__name__}: {error}")
        raise
    mesh.destroy()
    return status


def _record_failure(run: Path, rank: int, why: str) -> None:
    if events.is_first(run, "failed"):
        with suppress(OSError):  # the disk may be what has failed
            events.record(
                run, "failed", rank=rank, host=socket.gethostname(), why=" ".join(why.split())[:300]
            )
