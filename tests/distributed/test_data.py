"""Data inside a process group: one rank builds the sample index, every rank reads its share of it."""

from pathlib import Path

import torch.distributed as dist

from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.order import Share
from megakernel.config.tree import Config
from tests.unit.data.conftest import documents, prepared, write_jsonl

from .processes import cpu_mesh, run_ranks

STEPS = 30


def configuration(folder: Path, index: str) -> Config:
    return Config(
        run={"name": "test"},
        model={"num_layers": 1, "hidden_size": 64, "num_heads": 2},
        data={"train": folder / "prepared", "index_cache": folder / index, "num_workers": 0},
        training={"steps": STEPS, "seq_len": 32, "global_batch_size": 4, "eval_samples": 3},
    )


def read(config: Config, share: Share, **options: object) -> dict[str, list[list[list[int]]]]:
    """Tokens of the share's training micro-batches, by step, and of its validation batches."""
    corpora = Corpora(config.data)
    training = TrainingBatches(config, corpora, share, **options)
    validation = ValidationBatches(config, corpora, share, **options)
    return {
        "training": [
            [row for batch in step for row in batch.tokens.tolist()] for step in training.from_step(0)
        ],
        "validation": [batch.tokens[batch.loss_mask.any(1)].tolist() for batch in validation],
    }


def read_in_a_group(folder: Path, shards: int) -> dict[str, list[list[list[int]]]]:
    with cpu_mesh(context=shards):
        rank, size = dist.get_rank(), dist.get_world_size()
        share = Share(rank // shards, size // shards, rank % shards, shards)
        return read(
            configuration(folder, f"index-{shards}"), share, builds_index=rank == 0, barrier=dist.barrier
        )


def test_ranks_together_read_the_same_samples_as_one_process(tmp_path: Path):
    source = write_jsonl(tmp_path / "source.jsonl", documents(60, seed=1))
    prepared(tmp_path / "prepared", [str(source)])
    alone = read(configuration(tmp_path, "index"), Share())

    replicas = run_ranks(read_in_a_group, 2, tmp_path, 1)
    for step in range(STEPS):
        rows = [row for rows in zip(*(replica["training"][step] for replica in replicas)) for row in rows]
        assert rows == alone["training"][step]
    rows = [
        row
        for passes in zip(*(replica["validation"] for replica in replicas))
        for rows in passes
        for row in rows
    ]
    assert rows == [row for rows in alone["validation"] for row in rows]

    left, right = run_ranks(read_in_a_group, 2, tmp_path, 2)
    for step in range(STEPS):
        halves = zip(left["training"][step], right["training"][step])
        assert [[*a, *b] for a, b in halves] == alone["training"][step]
