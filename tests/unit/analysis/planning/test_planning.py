"""The planner: memory, traffic, time and the choice of layouts, without running a model."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megakernel.analysis.planning import ACCURACY, GPU, GPUS, RATES, Job, Layout, ledger, part_costs, plan
from megakernel.analysis.planning.memory import memory
from megakernel.analysis.planning.page import compare
from megakernel.analysis.planning.part_costs import CostMeter, PartShape
from megakernel.analysis.planning.plan import Plan, candidates, efficiency, scaled_config, scaling
from megakernel.analysis.planning.step import step
from megakernel.analysis.planning.traffic import (
    Transfer,
    part_transfers,
    ranks_in_node,
    seconds,
    step_transfers,
)
from megakernel.config import Config, ConfigError, Parallel, Problem, load
from megakernel.model.parameters import parameter_count
from megakernel.parallel.exchange_method import choose_method

from ...config import trees

CONFIGS = Path(__file__).parents[4] / "configs"
H100 = GPUS["h100"]
ONE_DEVICE = Layout(1, False, 1, 1, 1, 1, 1, "none")


def config(**sections) -> Config:
    sizes = {"num_layers": 8, "hidden_size": 1024, "num_heads": 16, **sections.pop("model", {})}
    training = {"seq_len": 8192, "global_batch_size": 16, **sections.pop("training", {})}
    return trees.config(model=sizes, training=training, **sections)


def shape(
    rows: int, tokens: int, *, context: int = 1, exchange: str = "auto", on_gpu: bool = True
) -> PartShape:
    return PartShape(rows, tokens, 1, False, context, "none", exchange, on_gpu)


SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 2}


def check_extrapolation(
    attention: str, part: str | int, large: PartShape, tolerance: float = 0.01, **training
) -> None:
    """Check that costs extrapolated from smaller shapes equal those of running the shape."""
    meter = CostMeter(config(model={**SMALL, "attention": attention}, training=training), 1000)
    found, run = meter.costs(part, large), meter._run(part, large)
    assert found is not run, "this shape is run, not extrapolated"
    assert found.saved == pytest.approx(run.saved, rel=1e-3)
    assert found.states == pytest.approx(run.states, abs=1e-3 * run.saved)
    assert found.excess == pytest.approx(run.excess, rel=tolerance)
    for message, amount in run.sent.items():
        assert tuple(found.sent[message]) == pytest.approx(tuple(amount), rel=1e-9), message


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("attention", ["flurka", "hedgehog", "softmax"])
def test_memory_is_linear_in_the_batch(attention, on_gpu):
    check_extrapolation(attention, 0, shape(32, 2048, on_gpu=on_gpu), seq_len=2048)


@pytest.mark.parametrize("attention", ["flurka", "hedgehog"])
def test_memory_of_a_scan_is_linear_in_tokens(attention, monkeypatch):
    monkeypatch.setattr(part_costs, "MANY_OPERATIONS", 0)
    check_extrapolation(attention, 0, shape(1, 16_384, on_gpu=False), seq_len=16_384)


def test_memory_of_packed_softmax_masks_is_quadratic_in_tokens(monkeypatch):
    monkeypatch.setattr(part_costs, "MANY_OPERATIONS", 0)
    check_extrapolation("softmax", 0, shape(1, 16_384, on_gpu=False), seq_len=16_384)


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("tokens", [32_768, 262_144])
def test_memory_of_a_chunked_loss_is_exactly_linear(tokens, on_gpu):
    wide = {"hidden_size": 2048, "num_heads": 16, "norm": "layernorm"}
    meter = CostMeter(config(model=wide, training={"dtype": "bfloat16"}), 50_257)
    large = shape(1, tokens, on_gpu=on_gpu)
    assert meter.costs("last", large) == meter._run("last", large)


def test_memory_is_linear_in_the_ranks_of_a_ring():
    check_extrapolation(
        "softmax", 0, shape(1, 1024, context=16, exchange="ring"), tolerance=0.5, seq_len=16_384
    )


@pytest.mark.parametrize("attention", ["flurka", "softmax"])
def test_costs_of_a_part_do_not_depend_on_earlier_runs(attention, monkeypatch):
    """The cache of operation shapes remembers which results share memory with arguments."""
    monkeypatch.setattr(ledger, "_SHAPES", {})
    run = config(model={**SMALL, "attention": attention})
    first, again = (CostMeter(run, 1000).costs(0, replace(shape(2, 512), recompute="full")) for _ in range(2))
    assert ledger._SHAPES
    assert first == again


def test_a_layer_of_a_million_tokens_is_measured_in_seconds():
    large = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "attention": "flurka"}
    meter = CostMeter(config(model=large, training={"seq_len": 2**20, "dtype": "bfloat16"}), 50_257)
    start = time.process_time()
    found = meter.costs(0, shape(1, 2**20))
    assert time.process_time() - start < 10
    assert found.saved > 2**20 * 4096 * 2


def test_masks_of_long_packed_softmax_are_counted_without_computing_them():
    meter = CostMeter(config(model={"attention": "softmax"}, training={"seq_len": 32_768}), 1000)
    start = time.process_time()
    found = meter.costs(0, shape(4, 32_768, on_gpu=False))
    # Computing their 2 GiB would take longer.
    assert time.process_time() - start < 5
    assert found.saved > 4 * 32_768**2 / 2


@pytest.mark.second
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_configuration_is_planned(name):
    run = load(CONFIGS / f"{name}.yaml")
    found = plan(run, 50_257, 2, GPUS["b200"])
    assert found.fitting or found.too_large


@pytest.fixture(scope="module")
def plan_for_16_devices() -> Plan:
    return plan(config(), 50_257, 16, H100)


@pytest.mark.parametrize("attention", ["flurka", "softmax", "hedgehog"])
def test_one_device_holds_the_parameters_of_the_whole_model(attention):
    run = config(model={"attention": attention})
    assert Job(run, 50_257, ONE_DEVICE).parameters == [parameter_count(run.model, 50_257, 8192)]


def test_layouts_are_exactly_those_that_the_configuration_accepts():
    """The configuration's own validation accepts each layout and refuses the others for the same reasons."""
    run = config(training={"seq_len": 1024}, model={"num_layers": 3, "attention": "gaussian", "num_heads": 4})
    found = list(candidates(run, 16, 8, 16))
    layouts = [item for item in found if isinstance(item, Layout)]
    refusals = [item for item in found if isinstance(item, Problem)]
    assert layouts
    assert refusals
    for layout in layouts:
        assert layout.devices == 16
        tree = run.model_dump(mode="json")
        for key, value in layout.keys().items():
            section, name = key.split(".")
            tree[section][name] = value
        assert Config.model_validate(tree).parallel.tensor == layout.tensor
    assert any("does not divide the 4 heads" in str(one) for one in refusals)
    assert any("exceeds model.num_layers=3" in str(one) for one in refusals)
    assert any("beyond DeepSpeed's pipeline engine" in str(one) for one in refusals)
    with pytest.raises(ConfigError, match="beyond DeepSpeed's pipeline engine"):
        trees.config(parallel={"pipeline": 2, "zero_stage": 3})
    assert Parallel(pipeline=2, zero_stage=1).model_size == 2


@pytest.mark.parametrize(
    "keys",
    [
        ["training.activation_checkpointing=full", "training.checkpoint_offload=true"],
        ["parallel.context=2", "parallel.state_exchange=ring"],
        ["model.attention=softmax", "parallel.context=2", "parallel.softmax_exchange=heads"],
        ["optimizer.trained=lora", "init.from=models/dense"],
    ],
)
def test_the_keys_of_every_layout_load_with_the_configuration(keys):
    """Also where configured keys have no effect in a layout."""
    file = CONFIGS / "pretrain-350m.yaml"
    layouts = [item for item in candidates(load(file, keys), 64, 8, 64) if isinstance(item, Layout)]
    assert any(layout.context == 1 for layout in layouts)
    for layout in layouts:
        if layout.micro_batch_size == 1:
            load(file, keys + [f"{key}={json.dumps(value)}" for key, value in layout.keys().items()])


def test_a_configured_exchange_excludes_layouts_that_it_does_not_support():
    run = config(model={"attention": "softmax"}, parallel={"context": 2, "softmax_exchange": "heads"})
    found = list(candidates(run, 64, 8, 64))
    assert max(item.context * item.tensor for item in found if isinstance(item, Layout)) == 16
    assert any("parallel.softmax_exchange=heads needs heads that divide" in str(item) for item in found)


def test_the_best_layout_is_the_fastest_that_fits(plan_for_16_devices):
    times = [one.step.seconds for one in plan_for_16_devices.fitting]
    assert times == sorted(times)
    assert all(one.memory.beyond(H100) <= 0 for one in plan_for_16_devices.fitting)
    assert all(0 < one.step.mfu < RATES["matrix"] for one in plan_for_16_devices.fitting)


def test_a_plan_that_does_not_fit_reports_the_missing_memory():
    run = config(model={"hidden_size": 8192, "num_heads": 64, "num_layers": 64})
    found = plan(run, 50_257, 8, H100)
    assert found.best is None
    nearest = found.too_large[0]
    assert nearest.memory.beyond(H100) == nearest.memory.total - 80e9 > 0
    assert found.why_none.startswith("needs ")


def test_higher_zero_stages_shard_more():
    run = config()
    layouts = [Layout(1, False, 1, 8, 1, zero, 1, "none") for zero in (1, 2, 3)]
    memory_parts = [memory(Job(run, 50_257, layout)).parts for layout in layouts]
    assert memory_parts[0]["optimizer"] == memory_parts[1]["optimizer"] == memory_parts[2]["optimizer"]
    assert memory_parts[0]["gradients"] > memory_parts[1]["gradients"]
    count = Job(run, 50_257, ONE_DEVICE).parameters[0]
    assert memory_parts[0]["optimizer"] == 12 * count / 8


@pytest.mark.parametrize("trained", ["lora", "mechanism"])
@pytest.mark.parametrize("zero", [1, 2])
def test_only_trained_weights_have_gradients_and_optimizer_state(trained, zero):
    layout = Layout(1, False, 1, 2, 1, zero, 1, "none")
    job = Job(config(optimizer={"trained": trained}, init={"from": "models/dense"}), 50_257, layout)
    assert 0 < job.trained[0] < 0.1 * job.parameters[0]
    parts = memory(job).parts
    assert parts["weights"] == 2 * job.parameters[0]
    assert parts["optimizer"] == 12 * job.trained[0] / 2
    assert 0 < parts["gradients"] <= 4 * job.trained[0]
    assert parts["exchange"] <= 6 * job.trained[0]
    gradients = next(one for one in step_transfers(job, 0) if one.operation != "all_gather")
    assert gradients.bytes in (4 * job.trained[0], 4 * job.trained[0] * job.micro_batches)


def test_what_deepspeed_offloads_is_not_on_the_device():
    def parts(zero: int, *offloaded: str) -> dict[str, float]:
        keys = {f"offload_{what}": {"device": "cpu"} for what in offloaded}
        layout = Layout(1, False, 1, 8, 1, zero, 1, "none")
        return memory(Job(config(deepspeed={"zero_optimization": keys}), 50_257, layout)).parts

    for zero in (1, 2, 3):
        assert parts(zero)["optimizer"] > parts(zero, "optimizer")["optimizer"] == 0
    assert parts(2)["gradients"] > parts(2, "optimizer")["gradients"] == 0
    assert parts(2, "param") == parts(2)  # DeepSpeed offloads weights under ZeRO 3 alone
    shards = parts(3)["weights"] - parts(3, "param")["weights"]
    assert shards == 2 * Job(config(), 50_257, ONE_DEVICE).parameters[0] / 8


@pytest.mark.parametrize("kind", ["distill", "transfer"])
def test_a_teacher_holds_weights_that_zero_does_not_shard(kind):
    layout = Layout(1, False, 1, 8, 1, 3, 1, "none")
    alone = memory(Job(config(), 50_257, layout)).parts
    job = Job(config(objective={"kind": kind, "teacher": "runs/dense"}), 50_257, layout)
    beside = memory(job).parts
    assert "teacher" not in alone
    assert beside["teacher"] == 2 * job.parameters[0]


@pytest.mark.parametrize(("less", "more"), [("full", "selective"), ("selective", "none")])
def test_recomputation_needs_less_memory_and_more_time(less, more):
    run = config(model={"attention": "linear"})
    jobs = [Job(run, 50_257, Layout(1, False, 1, 1, 1, 1, 1, recompute)) for recompute in (less, more)]
    saved = [memory(job).parts["activations"] + memory(job).parts["attention states"] for job in jobs]
    assert saved[0] < saved[1]
    assert step(jobs[0], H100).seconds > step(jobs[1], H100).seconds


@pytest.mark.parametrize(
    ("attention", "is_softmax"), [("retnet", False), ("hedgehog", False), ("local", True)]
)
def test_the_softmax_rate_applies_only_to_softmax_mechanisms(attention, is_softmax, monkeypatch):
    job = Job(config(model={"attention": attention}), 50_257, ONE_DEVICE)
    usual = step(job, H100).seconds
    monkeypatch.setitem(RATES, "softmax", RATES["softmax"] / 2)
    assert (step(job, H100).seconds > usual) == is_softmax


def test_only_ring_traffic_grows_with_length():
    def sent(attention: str, seq_len: int, exchange: str) -> float:
        run = config(model={"attention": attention}, training={"seq_len": seq_len})
        job = Job(run, 50_257, Layout(1, False, 8, 1, 1, 1, 1, "none"), GPU, exchange)
        return sum(one.sent for one in part_transfers(job, 0) if one.group == "cp")

    assert sent("flurka", 65_536, "configured") == sent("flurka", 1_048_576, "configured")
    assert sent("softmax", 32_768, "ring") == pytest.approx(4 * sent("softmax", 8192, "ring"))


def test_the_exchange_method_depends_on_the_size_of_the_states():
    meter = CostMeter(config(model={"attention": "hedgehog"}), 1000)
    heads, features, columns = 16, 128, 65
    state = heads * (features * columns + 1) * 4

    def sent(sequences: int) -> dict[str, float]:
        amounts = meter.costs(0, shape(sequences, 1024, context=8)).sent
        return {
            message.operation: amount.bytes for message, amount in amounts.items() if not message.backward
        }

    assert choose_method(8, 4 * state) == "gather"
    assert sent(4) == pytest.approx({"all_gather": 4 * state}, rel=1e-4)
    assert choose_method(8, 8 * state) == "ring"
    assert sent(8) == pytest.approx({"point-to-point": 8 * state}, rel=1e-4)


def test_traffic_between_nodes_has_the_speed_of_the_network_adapters():
    layout = Layout(4, True, 4, 2, 1, 1, 1, "none")
    inside = Transfer("tp", "all_gather", 1e9, 1, 4)
    across = Transfer("cp", "all_gather", 1e9, 1, 4)
    assert ranks_in_node(inside, layout, H100) == 4
    assert ranks_in_node(across, layout, H100) == 2
    fast, slow = (seconds(one, layout, H100) for one in (inside, across))
    # Three steps of a ring: all inside the node, or two of them across.
    latency = 3 * RATES["link_latency"], RATES["link_latency"] + 2 * RATES["network_latency"]
    assert fast == pytest.approx(3e9 / (450e9 * RATES["link"]) + latency[0])
    assert slow == pytest.approx(3e9 / (2 * 50e9 * RATES["network"]) + latency[1])
    slower = seconds(across, layout, H100.with_network(100, None))
    assert slower - latency[1] == pytest.approx(4 * (slow - latency[1]))


@pytest.mark.parametrize(("stages", "inside"), [(2, 2), (8, 2), (16, 1)])
def test_the_tied_embedding_is_reduced_between_the_first_and_the_last_stage(stages, inside):
    run = config(model={"num_layers": 16, "tie_embeddings": True})
    layout = Layout(1, False, 1, 1, stages, 1, 1, "none")
    for stage in (0, stages - 1):
        (reduced,) = step_transfers(Job(run, 50_257, layout), stage)
        assert ranks_in_node(reduced, layout, H100) == inside


def test_the_pipeline_bubble_is_that_of_its_stages():
    run = config()
    piped = step(Job(run, 50_257, Layout(1, False, 1, 1, 4, 1, 1, "none")), H100)
    busy = sum(seconds for part, seconds in piped.parts.items() if part not in ("bubble", "optimizer"))
    # 16 micro-batches over 4 stages: 3 of 19 slots are empty; reducing the tied embedding's gradient adds little.
    assert piped.parts["bubble"] == pytest.approx(busy * 3 / 16, rel=0.02)


@pytest.mark.second
def test_scaled_runs_grow_with_the_number_of_devices():
    run = config()
    assert scaled_config(run, "strong", 64, 16).training == run.training
    assert scaled_config(run, "weak", 64, 16).training.global_batch_size == 64
    assert scaled_config(run, "longer", 64, 16).training.seq_len == 32_768
    assert scaled_config(run, "weak", 1, 32) is None
    points = list(scaling(run, 50_257, [8, 16], "weak", H100))
    efficiencies = efficiency(points)
    assert efficiencies[0] == 1.0
    assert 0.5 < efficiencies[1] <= 1.01


@pytest.mark.second
def test_softmax_baselines_are_slower_on_long_sequences():
    run = config(training={"seq_len": 524_288, "global_batch_size": 1})
    own, ring, ulysses, heads = compare(run, 50_257, 4, H100).values()
    assert own.best.step.seconds * 4 < ring.best.step.seconds
    assert all(one.layout.context <= 4 for one in ulysses.fitting)
    assert {one.layout.context for one in (*heads.fitting, *heads.too_large)} == {1}


def test_the_stated_accuracy_is_the_measured_one():
    page = Path(__file__).parents[4] / "benchmarks/results/plan_calibration_cpu.md"
    lines = page.read_text().splitlines()
    for line in ACCURACY.values():
        assert any(found.strip("*;. ") == line for found in lines), line
