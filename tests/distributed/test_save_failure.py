"""A disk that is full on one rank of a real DeepSpeed engine."""

import resource
import threading
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from megakernel.checkpoint.folder import CheckpointFolder, Records, SaveFailed
from megakernel.checkpoint.manifest import SavedProgress
from megakernel.parallel.ranks import Ranks
from megakernel.training.state_files import StateFiles

from .processes import cpu_mesh, run_ranks


def gather_objects(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def engine_with_zero() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    engine.backward(engine(torch.ones(1, 256)).sum())
    engine.step()
    return engine


def save_twice(root: Path, failing_rank: int) -> tuple[str, int]:
    with cpu_mesh():
        rank = dist.get_rank()
        engine = engine_with_zero()
        files = StateFiles.install(engine)
        folder = CheckpointFolder(root, keep=2, ranks=Ranks(rank, dist.get_world_size(), gather_objects))

        def write(path: Path) -> Records:
            engine.save_checkpoint(str(path.parent), tag=path.name, save_latest=False)
            return files.write(files.take(), path, threading.Event())

        folder.save(SavedProgress(1, 0, 0, {}, {}), write)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == failing_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            folder.save(SavedProgress(2, 0, 0, {}, {}), write)
        except SaveFailed as error:
            message = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        good = folder.newest_good().checkpoint
        assert good is not None
        loaded, _ = engine.load_checkpoint(str(root), tag=good.folder.name)
        assert loaded is not None
        return message, good.step


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_keeps_the_previous_one(tmp_path):
    for failing_rank in (0, 1):
        root = tmp_path / str(failing_rank)
        outcomes = run_ranks(save_twice, 2, root, failing_rank)
        assert len(set(outcomes)) == 1
        message, newest = outcomes[0]
        assert newest == 1
        assert f"rank {failing_rank} on" in message
        assert {path.name for path in root.iterdir()} == {"step_1", "latest"}
