"""What of the data a process of a mesh reads."""

from typing import Any

from data_pipeline.order import Share
from megakernel.parallel import Mesh


def reading(mesh: Mesh) -> dict[str, Any]:
    """What `TrainingBatches` and `ValidationBatches` are told of this process: its share, and who builds the index."""
    return {
        "share": Share(mesh.dp.rank, mesh.dp.size, mesh.cp.rank, mesh.cp.size),
        "builds_index": mesh.rank == 0,
        "barrier": mesh.barrier,
    }
