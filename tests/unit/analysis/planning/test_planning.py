"""The planner: memory, traffic, time and the choice of layouts, without running a model."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from launch.plan_tables import verdict
from megakernel.analysis.planning import ACCURACY, GPU, GPUS, Layout, PlannedJob, ledger, part_costs, plan
from megakernel.analysis.planning.gpus import CHUNKED_FORM
from megakernel.analysis.planning.memory import memory
from megakernel.analysis.planning.page import with_attention
from megakernel.analysis.planning.part_costs import CostMeter, PartShape
from megakernel.analysis.planning.plan import RECOMPUTE, Plan, candidates, scaled_config, scaling
from megakernel.analysis.planning.seconds import seconds_line, step_flops, step_seconds, tokens_per_step
from megakernel.analysis.planning.traffic import part_transfers, sent_bytes, step_transfers
from megakernel.config import Config, ConfigError, Parallel, Problem, UserError, load
from megakernel.model import LanguageModel
from megakernel.model.parameters import parameter_count
from megakernel.model.settings import model_settings
from megakernel.parallel import OneProcess, prepare_device
from megakernel.parallel.exchange_method import choose_method
from tests.tiers import tiered

from ...config import trees

CONFIGS = Path(__file__).parents[4] / "configs"
H100 = GPUS["h100"]
ONE_DEVICE = Layout(1, False, 1, 1, 1, 1, 1, "none")


@pytest.fixture(autouse=True, scope="module")
def on_cpu():
    prepare_device("cpu", 0)


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
    assert found.excess == pytest.approx(run.excess, rel=tolerance)
    for message, amount in run.sent.items():
        assert found.sent[message] == pytest.approx(amount, rel=1e-9), message


SCANS = [("flurka", True), ("hedgehog", True), ("flurka", False), ("hedgehog", False)]


@pytest.mark.parametrize(("attention", "on_gpu"), tiered(SCANS, SCANS[:2]))
def test_memory_of_a_scan_is_linear_in_tokens(attention, on_gpu, monkeypatch):
    monkeypatch.setattr(part_costs, "MANY_OPERATIONS", 0)
    check_extrapolation(attention, 0, shape(1, 32_768, on_gpu=on_gpu), seq_len=32_768)


@pytest.mark.second
def test_long_shapes_are_extrapolated_from_the_longest_that_take_few_operations(monkeypatch):
    """Chosen blocks are few in short sequences: costs are linear only from some length on."""
    monkeypatch.setattr(part_costs, "MANY_OPERATIONS", 25_000)
    meter = CostMeter(config(model={**SMALL, "attention": "linformer_causal"}), 1000)
    meter.costs(0, shape(1, 131_072))
    run = {of.tokens for part, of in meter._known}
    few = max(run)
    assert few // 2 in run
    assert few < 131_072
    assert meter._operations(0, shape(1, 1), few) < 25_000 <= meter._operations(0, shape(1, 1), 2 * few)


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


@pytest.mark.parametrize("attention", ["flurka", "softmax"])
def test_the_ledger_counts_the_bytes_that_torch_counts(attention):
    """`MemTracker`, with real tensors: what each layer keeps, and the most that is held."""
    sizes = config(model={**SMALL, "attention": attention}, training={"seq_len": 512})
    model = LanguageModel(model_settings(sizes, OneProcess(), 1000)).train()
    tokens = torch.randint(0, 1000, (1, 512), generator=torch.Generator().manual_seed(0))
    batch = (tokens, torch.arange(512)[None], tokens.roll(-1, 1), torch.ones(1, dtype=torch.int64))

    def kept(live_bytes: Callable[[], int]) -> list[int]:
        readings, out = [live_bytes()], batch
        for layer in model.layers:
            out = layer(out)
            readings.append(live_bytes())
        out.sum().backward()
        model.zero_grad()
        return [after - before for before, after in pairwise(readings)]

    with ledger.Ledger() as counted:
        for x in (*model.parameters(), *model.buffers(), *batch):
            counted.add(x)
        ours = kept(lambda: counted.live_bytes)
    tracker = MemTracker()
    tracker.track_external(model, *batch)
    with tracker:
        theirs = kept(lambda: tracker.get_tracker_snapshot()[torch.device("cpu")]["Total"])
    assert ours == theirs
    assert counted.peak == tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


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
    found = meter.costs(0, shape(1, 32_768, on_gpu=False))
    # Computing their 512 MiB would take longer.
    assert time.process_time() - start < 5
    assert found.saved > 32_768**2 / 2


@pytest.mark.second
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_configuration_is_planned_or_refused_by_kind(name):
    run = load(CONFIGS / f"{name}.yaml")
    if run.model.encoder is not None:
        with pytest.raises(
            UserError, match=r"model\.kind=encoder_decoder is not planned: .*; train a few steps"
        ):
            plan(run, 50_257, 2, GPUS["b200"])
        return
    found = plan(run, 50_257, 2, GPUS["b200"])
    assert found.fitting or found.too_large


@pytest.fixture(scope="module")
def plan_for_16_devices() -> Plan:
    return plan(config(), 50_257, 16, H100)


@pytest.mark.parametrize(
    "model",
    [
        *({"attention": attention} for attention in ("flurka", "softmax", "hedgehog")),
        {"kind": "masked_lm", "attention": {"preset": "linformer", "compression": {"share_layers": True}}},
    ],
    ids=["flurka", "softmax", "hedgehog", "layers that share E and F"],
)
def test_one_device_holds_the_parameters_of_the_whole_model(model):
    run = config(model=model, data={"isolate_documents": model.get("kind") != "masked_lm"})
    assert PlannedJob(run, 50_257, ONE_DEVICE).parameters == [parameter_count(run.model, 50_257, 8192)]


def test_layouts_are_exactly_those_that_the_configuration_accepts():
    """The configuration's own validation accepts each layout and refuses the others for the same reasons."""
    run = config(training={"seq_len": 1024}, model={"num_layers": 3, "attention": "gaussian", "num_heads": 4})
    found = list(candidates(run, 16, 8))
    layouts = [layout for item in found if isinstance(item, list) for layout in item]
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


KEYS_OF_RUNS = [
    ["training.activation_checkpointing=full", "training.checkpoint_offload=true"],
    ["parallel.context=2", "parallel.state_exchange=ring"],
    ["model.attention=softmax", "parallel.context=2", "parallel.softmax_exchange=heads"],
    ["optimizer.trained=lora", "init.from=models/dense"],
]


@pytest.mark.second
@pytest.mark.parametrize("keys", KEYS_OF_RUNS)
def test_the_keys_of_every_layout_load_with_the_configuration(keys):
    """Also where configured keys have no effect in a layout."""
    file = CONFIGS / "pretrain-350m.yaml"
    found = candidates(load(file, keys), 64, 8)
    layouts = [layout for item in found if isinstance(item, list) for layout in item]
    assert any(layout.context == 1 for layout in layouts)
    for layout in layouts:
        if layout.micro_batch_size == 1:
            load(file, keys + [f"{key}={json.dumps(value)}" for key, value in layout.keys().items()])


def test_a_configured_exchange_excludes_layouts_that_it_does_not_support():
    run = config(model={"attention": "softmax"}, parallel={"context": 2, "softmax_exchange": "heads"})
    found = list(candidates(run, 64, 8))
    assert max(item[0].context * item[0].tensor for item in found if isinstance(item, list)) == 16
    assert any("parallel.softmax_exchange=heads needs heads that divide" in str(item) for item in found)


def test_the_best_layout_recomputes_and_cuts_the_model_least_and_of_those_sends_least(plan_for_16_devices):
    ranks = [one.rank for one in plan_for_16_devices.fitting]
    assert ranks == sorted(ranks)
    assert all(one.memory.beyond(H100) <= 0 for one in plan_for_16_devices.fitting)
    best = plan_for_16_devices.best
    assert best.layout.recompute == "none"
    assert best.layout.data == 16
    plain = [
        one for one in plan_for_16_devices.fitting if one.layout.recompute == "none" and one.layout.data == 16
    ]
    assert len(plain) > 1
    assert sum(best.sent.values()) == min(sum(one.sent.values()) for one in plain)


def test_a_run_that_fits_as_configured_has_nothing_to_change(plan_for_16_devices):
    assert plan_for_16_devices.nearest is plan_for_16_devices.configured
    assert plan_for_16_devices.nearest.overrides == {}
    assert verdict(plan_for_16_devices)[0].startswith("fits as configured: ")


@pytest.mark.second
def test_the_nearest_layout_that_fits_changes_fewest_keys(tmp_path):
    large = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32}
    sizes = {"training": {"dtype": "bfloat16", "seq_len": 8192, "global_batch_size": 64}}
    file = trees.file(tmp_path, model=large, parallel={"zero_stage": 1}, **sizes)
    found = plan(load(file), 50_257, 64, H100)
    assert found.configured.memory.beyond(H100) > 0
    nearest = found.nearest
    assert nearest.memory.beyond(H100) <= 0
    assert len(nearest.overrides) == min(len(one.overrides) for one in found.fitting) > 0
    again = plan(load(file, nearest.words.split()), 50_257, 64, H100)
    assert again.configured.layout == nearest.layout
    assert again.configured.overrides == {}
    lines = verdict(found)
    assert lines[0].startswith("does not fit as configured: ")
    assert lines[1] == f"nearest that fits: {nearest.words}"


def test_a_layout_that_does_not_divide_the_devices_is_none_and_has_a_nearest():
    found = plan(config(parallel={"tensor": 4}), 50_257, 2, H100)
    assert found.configured.startswith("processes=2 is not a multiple of")
    assert found.nearest.layout.devices == 2
    assert verdict(found)[0].startswith("not possible as configured: processes=2")


@pytest.mark.second
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
    memory_parts = [memory(PlannedJob(run, 50_257, layout)).parts for layout in layouts]
    assert memory_parts[0]["optimizer"] == memory_parts[1]["optimizer"] == memory_parts[2]["optimizer"]
    assert memory_parts[0]["gradients"] > memory_parts[1]["gradients"]
    count = PlannedJob(run, 50_257, ONE_DEVICE).parameters[0]
    assert memory_parts[0]["optimizer"] == 12 * count / 8


@pytest.mark.parametrize("trained", ["lora", "mechanism"])
@pytest.mark.parametrize("zero", [1, 2])
def test_only_trained_weights_have_gradients_and_optimizer_state(trained, zero):
    layout = Layout(1, False, 1, 2, 1, zero, 1, "none")
    job = PlannedJob(config(optimizer={"trained": trained}, init={"from": "models/dense"}), 50_257, layout)
    assert 0 < job.trained[0] < 0.1 * job.parameters[0]
    parts = memory(job).parts
    assert parts["weights"] == 2 * job.parameters[0]
    assert parts["optimizer"] == 12 * job.trained[0] / 2
    assert 0 < parts["gradients"] <= 4 * job.trained[0]
    # Two buckets in bfloat16, and what is reduced in float32.
    assert parts["exchange"] <= 8 * job.trained[0]
    gradients = next(one for one in step_transfers(job, 0) if one.operation != "all_gather")
    assert gradients.bytes in (4 * job.trained[0], 4 * job.trained[0] * job.micro_batches)


def test_what_deepspeed_offloads_is_not_on_the_device():
    def parts(zero: int, *offloaded: str) -> dict[str, float]:
        keys = {f"offload_{what}": {"device": "cpu"} for what in offloaded}
        layout = Layout(1, False, 1, 8, 1, zero, 1, "none")
        return memory(PlannedJob(config(deepspeed={"zero_optimization": keys}), 50_257, layout)).parts

    for zero in (1, 2, 3):
        assert parts(zero)["optimizer"] > parts(zero, "optimizer")["optimizer"] == 0
    assert parts(2)["gradients"] > parts(2, "optimizer")["gradients"] == 0
    assert parts(2, "param") == parts(2)  # DeepSpeed offloads weights under ZeRO 3 alone
    shards = parts(3)["weights"] - parts(3, "param")["weights"]
    assert shards == 2 * PlannedJob(config(), 50_257, ONE_DEVICE).parameters[0] / 8


@pytest.mark.parametrize("kind", ["distill", "transfer"])
def test_a_teacher_holds_weights_that_zero_does_not_shard(kind):
    layout = Layout(1, False, 1, 8, 1, 3, 1, "none")
    alone = memory(PlannedJob(config(), 50_257, layout)).parts
    job = PlannedJob(config(objective={"kind": kind, "teacher": "runs/dense"}), 50_257, layout)
    beside = memory(job).parts
    assert "teacher" not in alone
    assert beside["teacher"] == 2 * job.parameters[0]


@pytest.mark.parametrize(("less", "more"), [("full", "selective"), ("selective", "none")])
def test_recomputation_needs_less_memory(less, more):
    run = config(model={"attention": "linear"})
    jobs = [PlannedJob(run, 50_257, Layout(1, False, 1, 1, 1, 1, 1, recompute)) for recompute in (less, more)]
    saved = [memory(job).parts["activations"] for job in jobs]
    assert saved[0] < saved[1]
    assert RECOMPUTE.index(less) > RECOMPUTE.index(more)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("attention", ["flurka", "hedgehog"])
def test_a_shard_of_a_sequence_keeps_what_a_sequence_of_its_length_keeps(attention, recompute):
    """What outlived the layer's backward would be counted once for all layers."""
    meter = CostMeter(config(model={"attention": attention}), 1000)
    whole, shard = (
        meter.costs(0, replace(shape(2, 4096, context=ranks), recompute=recompute)) for ranks in (1, 2)
    )
    assert shard.saved == pytest.approx(whole.saved, rel=0.2)
    assert shard.tables < 0.02 * meter.costs(0, shape(2, 4096)).saved


def test_only_ring_traffic_grows_with_length():
    def sent(attention: str, seq_len: int, exchange: str) -> float:
        parallel = {"context": 8, "softmax_exchange": exchange}
        run = config(model={"attention": attention}, training={"seq_len": seq_len}, parallel=parallel)
        job = PlannedJob(run, 50_257, Layout(1, False, 8, 1, 1, 1, 1, "none"), GPU)
        return sum(one.sent for one in part_transfers(job, 0) if one.group == "cp")

    assert sent("flurka", 65_536, "auto") == sent("flurka", 1_048_576, "auto")
    assert sent("softmax", 32_768, "ring") == pytest.approx(4 * sent("softmax", 8192, "ring"))


def test_the_exchange_method_depends_on_the_size_of_the_states():
    meter = CostMeter(config(model={"attention": "hedgehog"}), 1000)
    heads, features, columns = 16, 128, 65
    state = heads * (features * columns + 1) * 4

    def sent(sequences: int) -> dict[str, float]:
        amounts = meter.costs(0, shape(sequences, 1024, context=8)).sent
        return {message.operation: size for message, size in amounts.items()}

    # Forward sends a state, and backward its gradient.
    assert choose_method(8, 4 * state) == "gather"
    assert sent(4) == pytest.approx({"all_gather": 2 * 4 * state}, rel=1e-4)
    assert choose_method(8, 8 * state) == "ring"
    assert sent(8) == pytest.approx({"send": 2 * 8 * state}, rel=1e-4)


@pytest.mark.parametrize("stages", [2, 8])
def test_the_tied_embedding_is_reduced_between_the_first_and_the_last_stage(stages):
    run = config(model={"num_layers": 16, "tie_embeddings": True})
    job = PlannedJob(run, 50_257, Layout(1, False, 1, 1, stages, 1, 1, "none"))
    for stage in (0, stages - 1):
        (reduced,) = step_transfers(job, stage)
        assert reduced.sent == reduced.bytes == 4 * job.embedding
    assert sent_bytes(job)["pp"] > 4 * job.embedding


def test_the_idle_time_of_a_pipeline_is_that_of_its_stages():
    # 16 micro-batches over 4 stages: 3 of 19 slots are empty.
    piped = PlannedJob(config(), 50_257, Layout(1, False, 1, 1, 4, 1, 1, "none"))
    assert piped.idle == pytest.approx(3 / 19)
    assert PlannedJob(config(), 50_257, ONE_DEVICE).idle == 0


@pytest.mark.second
def test_scaled_runs_grow_with_the_number_of_devices():
    run = config()
    assert scaled_config(run, "strong", 64, 16).training == run.training
    assert scaled_config(run, "weak", 64, 16).training.global_batch_size == 64
    assert scaled_config(run, "longer", 64, 16).training.seq_len == 32_768
    assert scaled_config(run, "weak", 1, 32) is None
    few, more = scaling(run, 50_257, [8, 16], "weak", H100)
    assert more.config.training.global_batch_size == 2 * few.config.training.global_batch_size
    assert (few.best.layout.devices, more.best.layout.devices) == (8, 16)


def test_softmax_needs_more_work_and_traffic_on_long_sequences():
    run = config(training={"seq_len": 524_288, "global_batch_size": 1})
    softmax = with_attention(run, "softmax")
    assert step_flops(softmax, 50_257) > 4 * step_flops(run, 50_257)
    layout = Layout(1, False, 4, 1, 1, 1, 1, "full")
    assert (
        sent_bytes(PlannedJob(softmax, 50_257, layout))["cp"]
        > 100 * sent_bytes(PlannedJob(run, 50_257, layout))["cp"]
    )


def test_seconds_are_flops_over_the_measured_share_of_the_peak():
    """The run that was measured: docs/results.md has 92,000 to 111,000 tokens/s."""
    keys = ["training.micro_batch_size=4", "training.global_batch_size=8"]
    run, h200 = load(CONFIGS / "pretrain-350m.yaml", keys), GPUS["h200"]
    (measured,) = h200.measured
    seconds = step_seconds(run, 257, 1, h200)
    assert seconds == step_flops(run, 257) / (989e12 * 0.195)
    least, most = (tokens_per_step(run) / seconds * share / measured.middle for share in measured.mfu)
    assert (least, most) == pytest.approx((92_000, 111_000), rel=0.03)
    page = (CONFIGS.parent / measured.source).read_text()
    assert "92,000 to 111,000\n  tokens/s, 18 to 21 % MFU" in page
    line = seconds_line(run, 257, 1, h200)
    assert "19.5% MFU, the middle of 18% to 21% measured with configs/pretrain-350m.yaml" in line
    assert "measured/predicted so far 0.93 to 1.08" in line


@pytest.mark.parametrize(("gpu", "dtype"), [("h100", "bfloat16"), ("h200", "float32")])
def test_no_seconds_are_invented_where_none_were_measured(gpu, dtype):
    run = config(training={"dtype": dtype})
    assert step_seconds(run, 1000, 8, GPUS[gpu]) is None
    assert f"no seconds, as no {dtype} step was measured on" in seconds_line(run, 1000, 8, GPUS[gpu])


@pytest.mark.second
def test_plans_without_triton_are_off_by_what_they_say():
    shares = []
    for attention in ("flurka", "hedgehog", "linear", "softmax", "local", "gated_deltanet"):
        run = load(CONFIGS / "pretrain-350m.yaml", [f"model.attention={attention}"])
        with pytest.MonkeyPatch.context() as patch:
            kernels = CostMeter(run, 50_257).costs(0, shape(1, 8192)).saved
            patch.setattr(part_costs, "counts_kernels", lambda: False)
            shares.append(CostMeter(run, 50_257).costs(0, shape(1, 8192)).saved / kernels)
    assert (min(shares), max(shares)) == pytest.approx(CHUNKED_FORM, abs=0.005)


def test_the_stated_accuracy_is_the_measured_one():
    page = Path(__file__).parents[4] / "benchmarks/results/plan_calibration_cpu.md"
    lines = page.read_text().splitlines()
    for line in ACCURACY.values():
        assert any(found.strip("*;. ") == line for found in lines), line
