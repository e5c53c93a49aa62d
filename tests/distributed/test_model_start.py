"""A run's model is built layer by layer: each matrix is drawn once, and no rank needs the whole model for it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megakernel.analysis.planning.ledger import Ledger
from megakernel.analysis.planning.memory import memory, start_bytes
from megakernel.checkpoint.whole_tensors import partitions
from megakernel.model import LanguageModel, build_model
from megakernel.model.settings import DTYPES, model_settings
from megakernel.model.start import LayerStart
from megakernel.parallel import OneProcess
from megakernel.training.deepspeed_config import zero3_sharding
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.test_planned_memory import VOCAB, job
from tests.tiers import tiered

from ..unit.config import trees

MODEL = {
    **{"num_layers": 8, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "tie_embeddings": False},
    **{"attention": "flurka", "attention_pattern": ["main", "softmax", "mamba2"], "position": "learned"},
}
LORA = {"trained": "lora"}
NARROW = {"hidden_size": 32, "attention": "softmax"}
"""For peaks: layers much smaller than the model."""


def changes(**parallel):
    return {
        "model": MODEL,
        "parallel": parallel,
        "optimizer": LORA if parallel.get("zero_stage", 0) < 3 else {},
        "training": {"dtype": "float32", "seq_len": 128, "global_batch_size": 8},
    }


def started(config, mesh):
    """The model as an `Engine` builds it."""
    start = LayerStart(mesh, DTYPES[config.training.dtype], zero3_sharding(config, mesh))
    return build_model(replace(model_settings(config, mesh, VOCAB), start=start))


def drawn_and_wrong(sections):
    """Numbers that this rank draws, and the tensors that are not its shard of what one process draws."""
    config, drawn = trees.config(init={"from": "dense"}, **sections), []
    normal = nn.init.normal_

    def counting(tensor, **options):
        drawn.append(tensor.numel())
        return normal(tensor, **options)

    with cpu_mesh(**sections["parallel"]) as mesh:
        with patch.object(nn.init, "normal_", counting):
            model = started(config, mesh)
        one = LanguageModel(model_settings(config, OneProcess(), VOCAB)).state_dict()
        cuts, tp = partitions(model), mesh.tp
        wrong = []
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                shard = cuts[name].shard(one[name], tp.rank, tp.size)
                if hasattr(tensor, "ds_tensor"):  # of ZeRO 3, padded at its end
                    size, first = tensor.ds_tensor.numel(), tensor.ds_tensor.numel() * mesh.gradient.rank
                    shard = shard.flatten()[first : first + size]
                    tensor = tensor.ds_tensor[: len(shard)]
                if not torch.equal(tensor, shard):
                    wrong.append(name)
        return sum(drawn), wrong


LAYOUTS = {
    "dp2": (2, {"zero_stage": 1}),
    "zero 3": (2, {"zero_stage": 3}),
    "tp2": (2, {"zero_stage": 0, "tensor": 2}),
    "tp2 dp2": (4, {"zero_stage": 2, "tensor": 2}),
    "tp2 dp2 zero 3": (4, {"zero_stage": 3, "tensor": 2}),
    "tp4": (4, {"zero_stage": 0, "tensor": 4}),  # two ranks hold the same key head
    "pp2 cp2": (4, {"zero_stage": 0, "pipeline": 2, "context": 2}),
}


@pytest.mark.parametrize("name", tiered(LAYOUTS, ["tp2 dp2", "zero 3"]))
def test_all_ranks_together_draw_each_matrix_once_and_have_the_weights_of_one_process(name):
    ranks, parallel = LAYOUTS[name]
    sections = changes(**parallel)
    found = run_ranks(drawn_and_wrong, ranks, sections)
    [(whole, _)] = run_ranks(drawn_and_wrong, 1, {**sections, "parallel": {"zero_stage": 0}})
    assert [wrong for _, wrong in found] == [[]] * ranks
    assert sum(drawn for drawn, _ in found) == whole
    # Eleven layers do not divide evenly, and embeddings are larger than the others.
    assert max(drawn for drawn, _ in found) < 0.75 * whole


def peak_of_the_start(sections):
    """Most bytes of tensors that live at once while this rank's model is built, the host's and the device's."""
    config = trees.config(**sections)
    with cpu_mesh(**sections["parallel"]) as mesh, Ledger() as ledger:
        model = started(config, mesh)
        count = sum(getattr(x, "ds_numel", x.numel()) for x in model.parameters())
        return ledger.peak, 4 * count


@pytest.mark.second
@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_3_builds_a_model_in_its_shards_and_one_layer(ranks):
    sections = changes(zero_stage=3)
    sections["model"] = {**MODEL, **NARROW, "num_layers": 48, "attention_pattern": ["main"]}
    planned = start_bytes(job(sections, ranks), 0)
    for peak, whole in run_ranks(peak_of_the_start, ranks, sections):
        assert peak < 0.75 * whole
        # 15 %: small weights that are copied while they are sharded, and the padding of shards
        assert peak == pytest.approx(sum(planned.values()), rel=0.15)


def test_a_plan_counts_the_largest_layer_of_the_start():
    """A layer is whole on each device before ZeRO 3 shards it, however many shards there are."""
    sections = changes(zero_stage=3)
    sections["model"] = {**MODEL, "hidden_size": 1024, "vocab_size": 4_000_000}
    sections["model"] |= {"position": "rope", "tie_embeddings": True}
    sections["training"] |= {"global_batch_size": 512, "loss_chunk_size": 128}
    embedding = 4_000_000 * 1024 * 4
    assert start_bytes(job(sections, 512), 0)["workspace"] == pytest.approx(embedding, rel=1e-6)
    assert memory(job(sections, 512)).total >= sum(start_bytes(job(sections, 512), 0).values())
