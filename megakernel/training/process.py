"""A rank's process group and device, around its work."""

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


def run_in_mesh(config: Config, process: ProcessEnvironment, work: "Callable[[Mesh], int]") -> int:
    """Create the mesh, call `work` with it, destroy it, and return the result of `work`.

    `work` must itself import what needs Megatron-core and DeepSpeed, which choose their device when imported.
    """
    mesh = None
    try:
        from megakernel.parallel import prepare_device

        sizes = (config.parallel.tensor, config.parallel.context)
        device = prepare_device(config.training.device, process.local_rank, *sizes)
        from megakernel.parallel import Mesh

        mesh = Mesh.create(config.parallel, process, device)
        status = work(mesh)
    except (UserError, RunFailed) as error:
        # Once there is a mesh, all ranks raise these alike.
        reports = process.rank == 0 or mesh is None
        if reports and (isinstance(error, RunFailed) or events.in_job()):
            _record_failure(config.run.folder, process.rank, str(error))
        if mesh is not None:
            mesh.destroy()
        raise
    except Exception as error:
        # Only this rank fails: destroying its groups would make the others fail first and hide the cause.
        _record_failure(config.run.folder, process.rank, f"{type(error).__name__}: {error}")
        raise
    mesh.destroy()
    return status


def _record_failure(run: Path, rank: int, why: str) -> None:
    if events.is_first(run, "failed"):
        with suppress(OSError):  # the cause may be a full disk
            events.record(
                run, "failed", rank=rank, host=socket.gethostname(), why=" ".join(why.split())[:300]
            )
