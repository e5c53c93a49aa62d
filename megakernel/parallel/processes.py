"""The rank of a process and its rendezvous; imports no torch, so that launchers start fast."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessEnvironment:
    """The rank of one process, and the address of the rendezvous."""

    rank: int = 0
    """Rank of this process, 0 <= rank < world_size."""

    world_size: int = 1
    """Processes of the job."""

    local_rank: int = 0
    """Rank of this process on its machine; the device's index, if the process sees several devices."""

    local_world_size: int = 1
    """Processes on this machine."""

    master_address: str = "127.0.0.1"
    """Host of rank 0."""

    master_port: int = 29500
    """Port on which rank 0 listens."""

    def variables(self) -> dict[str, str]:
        """The environment variables that torch.distributed and DeepSpeed read, under torchrun's names."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }
