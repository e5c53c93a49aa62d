"""The planner's traffic is exactly what real ranks pass to collectives."""

from collections import Counter
from typing import Any

import pytest

from megakernel.analysis.planning.traffic import traffic
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.test_planned_memory import VOCAB, job

from ..unit.config import trees

pytestmark = pytest.mark.second

BOOKKEEPING = 64
"""Bytes of norms, flags and counts that DeepSpeed and the loss exchange once per step."""


def sent_by_this_rank(cases: list[dict[str, Any]]) -> list[dict[tuple[str, str], int]]:
    """The bytes of each case; the cases have one mesh."""
    from benchmarks.real_runs import sent_bytes

    with cpu_mesh(**cases[0].get("parallel", {})) as mesh:
        return [sent_bytes(trees.config(**changes), VOCAB, mesh) for changes in cases]


def planned(changes: dict[str, Any], world: int, stage: int = 0) -> Counter[tuple[str, str]]:
    sums: Counter[tuple[str, str]] = Counter()
    for one in traffic(job(changes, world), stage):
        sums[one.group, one.operation] += round(one.bytes)
    return sums


def check_traffic(*cases: dict[str, Any], world: int = 2) -> None:
    """Compare the bytes of every group and operation on the first rank."""
    groups = {"tp", "cp", "gradient"}
    for changes, sent in zip(cases, run_ranks(sent_by_this_rank, world, cases)[0], strict=True):
        real = {key: count for key, count in sent.items() if key[0] in groups and count > BOOKKEEPING}
        counted = {key: count for key, count in planned(changes, world).items() if key[0] in groups}
        assert real.keys() == counted.keys(), changes
        for key, count in real.items():
            assert 0 <= count - counted[key] <= BOOKKEEPING, (changes, key, count, counted[key])


def case(attention: Any, seq_len: int = 512, batch: int = 2, **changes: Any) -> dict[str, Any]:
    model = {"num_layers": 2, "attention": attention, **changes.pop("model", {})}
    training = {"seq_len": seq_len, "global_batch_size": batch, **changes.pop("training", {})}
    return {"model": model, "training": training, **changes}


def test_the_ring_passes_a_state_once_in_each_direction():
    """The bytes that `test_traffic.py` counts on a middle rank, for any number of ranks."""
    changes = case("linear", parallel={"context": 4, "state_exchange": "ring", "zero_stage": 1})
    layers, micro_batches = 2, 2
    numbers = 2 * 4 * 32 * 33 + 4
    bytes_by_operation = planned(changes, 4)
    assert bytes_by_operation["cp", "send"] == layers * micro_batches * numbers * 4
    assert bytes_by_operation["cp", "all_gather"] == 0


@pytest.mark.parametrize("attention", ["flurka", "hedgehog", "softmax", "local"])
def test_context_parallel_traffic_is_planned(attention):
    trainings = (
        {"activation_checkpointing": recompute, "micro_batch_size": 2}
        for recompute in ("none", "selective", "full")
    )
    check_traffic(*(case(attention, 1024, parallel={"context": 2}, training=each) for each in trainings))


@pytest.mark.parametrize("exchange", ["auto", "heads", "ring"])
def test_traffic_of_sliding_windows_is_planned(exchange):
    parallel = {"context": 2, "softmax_exchange": exchange}
    layers = ({"preset": "softmax", "window": window} for window in (16, 700))
    check_traffic(*(case(layer, 1024, parallel=parallel) for layer in layers))


def test_shared_key_heads_are_sent_once_unless_ulysses_has_to_repeat_them():
    heads = {"flurka": 2, "softmax": 1}
    parts = [(name, {"num_kv_heads": count}) for name, count in heads.items()]
    check_traffic(*(case(name, 512, parallel={"context": 2}, model=model) for name, model in parts))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_traffic_is_planned(sequence_parallel):
    parallel = {"tensor": 2, "sequence_parallel": sequence_parallel}
    trainings = ({"activation_checkpointing": recompute} for recompute in ("none", "full"))
    check_traffic(*(case("flurka", 512, parallel=parallel, training=each) for each in trainings))


def test_traffic_of_tensor_ranks_with_the_same_key_head_is_planned():
    heads = [case("mamba2", 512, parallel={"tensor": 4}, model={"num_kv_heads": count}) for count in (1, 2)]
    for changes in heads:  # of other groups
        check_traffic(changes, world=4)


def test_tensor_parallel_traffic_of_a_chunked_loss_is_planned():
    check_traffic(case("softmax", 512, parallel={"tensor": 2}, training={"loss_chunk_size": 128}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_of_every_zero_stage_is_planned(stage):
    dtypes = ("float32", "bfloat16")[: 1 + (stage > 0)]  # bfloat16 needs master weights
    cases = [{"parallel": {"zero_stage": stage}, "training": {"dtype": dtype}} for dtype in dtypes]
    check_traffic(*(case("flurka", 256, 4, **changes) for changes in cases))


@pytest.mark.parametrize("parallel", [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"tensor": 2}])
def test_traffic_of_muon_is_planned(parallel):
    single = {"training": {"dtype": "float32"}}
    check_traffic(case("flurka", 256, 4, parallel=parallel, optimizer={"name": "muon"}, **single))


@pytest.mark.parametrize("stage", [1, 2])
def test_only_gradients_of_trained_weights_are_planned_to_be_sent(stage):
    lora = {"init": {"from": "a run"}, "optimizer": {"trained": "lora"}, "parallel": {"zero_stage": stage}}
    check_traffic(case("flurka", 256, 4, **lora))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_pipeline_traffic_is_planned(dropout):
    changes = case("flurka", 512, 4, parallel={"pipeline": 2}, model={"dropout": {"residual": dropout}})
    for stage, [real] in enumerate(run_ranks(sent_by_this_rank, 2, [changes])):
        sent = sum(count for (_, operation), count in real.items() if operation == "send")
        # DeepSpeed first sends the shapes of its tensors.
        assert 0 <= sent - planned(changes, 2, stage)["pp", "send"] <= BOOKKEEPING
