"""Training and attention on one CUDA device (`pytest -m gpu`)."""

import json
import pickle
from dataclasses import replace

import pytest
import torch

from launch.cli import main
from megakernel import attention
from megakernel.attention import AttentionInputs
from megakernel.model.layer import recomputed
from megakernel.training.observing.profiler import snapshot_on_out_of_memory

pytestmark = pytest.mark.gpu

PRESETS = ["softmax", "local", "linear", "performer", "hedgehog", "flurka", "flurka_kernel"]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_on_cuda_equals_float64_on_cpu(preset, packed):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 32, dtype=torch.float64) for heads in (4, 2, 2))
    positions = torch.cat([torch.arange(130), torch.arange(170)]).expand(2, -1) if packed else None
    module = attention.build(preset, num_heads=4, num_kv_heads=2, head_dim=32)
    expected, expected_grad = _run(module.double(), q, k, v, positions)
    actual, actual_grad = _run(module.float().cuda(), *(x.float().cuda() for x in (q, k, v)), positions)
    # float32 sums of 300 terms, and TF32 off.
    assert _error(actual, expected) < 1e-5
    assert _error(actual_grad, expected_grad) < 1e-4


@pytest.mark.parametrize("preset", PRESETS)
def test_attention_in_bfloat16_is_near_float64(preset):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 2000, 64, dtype=torch.bfloat16) for _ in range(3))
    module = attention.build(preset, num_heads=4, head_dim=64)
    expected, _ = _run(module.double(), q.double(), k.double(), v.double(), None)
    actual, _ = _run(module.float().cuda(), q.cuda(), k.cuda(), v.cuda(), None)
    assert _error(actual, expected) < 2e-2  # docs/formulas.md, 8: property 8


@pytest.mark.parametrize(
    "preset", ["linear", "performer", "hedgehog", "flurka", "flurka_kernel", "gated_deltanet", "mamba2"]
)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("key_heads", [4, 16])
def test_two_runs_give_the_same_bits(preset, width, key_heads):
    # So many programs that they overlap as in training: what the compiler lets race differs only then. (Backward of
    # torch's softmax adds in any order.)
    torch.manual_seed(0)
    tree = {"preset": preset} | ({"feature_map": {"samples": width}} if preset == "performer" else {})
    module = attention.build(tree, num_heads=16, num_kv_heads=key_heads, head_dim=width).cuda()
    q, k, v = (
        torch.randn(1, heads, 16384, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for heads in (16, key_heads, key_heads)
    )
    inputs = AttentionInputs(rotary=attention.Rotary(width))
    if numbers := module.spec.further:
        inputs = replace(inputs, further=k[..., :numbers].detach())
    runs = []
    for _ in range(3):
        out = module(q, k, v, inputs)
        runs.append([out, *torch.autograd.grad(out, [q, k, v], torch.ones_like(out))])
    for other in runs[1:]:
        assert [torch.equal(a, b) for a, b in zip(other, runs[0])] == [True] * 4


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_training_on_cuda_lowers_the_loss_in_bfloat16(zero_stage, tmp_path):
    losses = _train(tmp_path, "training.dtype=bfloat16", f"parallel.zero_stage={zero_stage}")
    assert losses[-1] < losses[0] - 1.0


def test_training_on_cuda_has_the_losses_of_the_cpu(tmp_path):
    cuda = _train(tmp_path / "cuda", "training.dtype=float32", "training.steps=5")
    cpu = _train(tmp_path / "cpu", "training.dtype=float32", "training.steps=5", "training.device=cpu")
    assert cuda == pytest.approx(cpu, rel=1e-4)  # float32 sums of every matrix product in another order


def test_offloaded_layer_inputs_leave_the_device_until_backward():
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    hidden = torch.randn(8192, 1, 1024, device="cuda", requires_grad=True)
    allocated, gradients = {}, {}
    for offload in (False, True):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = hidden
        for _ in range(4):
            out = recomputed(lambda x, _: torch.tanh(x @ weight), out, None, offload=offload)
        allocated[offload] = torch.cuda.memory_allocated() - before
        hidden.grad = weight.grad = None
        out.sum().backward()
        gradients[offload] = hidden.grad, weight.grad
    size = hidden.numel() * hidden.element_size()
    # Of four layers, the inputs of three are offloaded; the first one is `hidden`, which the test holds.
    assert allocated[False] - allocated[True] == 3 * size
    assert all(torch.equal(a, b) for a, b in zip(*gradients.values()))


def test_running_out_of_memory_writes_a_memory_snapshot(tmp_path, capsys):
    tensor = torch.empty(1 << 20, device="cuda")
    with pytest.raises(torch.OutOfMemoryError), snapshot_on_out_of_memory(tmp_path, rank=3):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    file = tmp_path / "profile/out_of_memory/rank_3.memory.pickle"
    segments = pickle.loads(file.read_bytes())["segments"]
    assert sum(segment["allocated_size"] for segment in segments) >= tensor.nbytes
    assert str(file) in capsys.readouterr().err


def _run(module, q, k, v, positions):
    q = q.requires_grad_()
    positions_on_device = None if positions is None else positions.to(q.device)
    out = module(
        q, k, v, AttentionInputs(positions=positions_on_device, rotary=attention.Rotary(q.shape[-1]))
    )
    out.double().square().sum().backward()
    return out.detach(), q.grad


def _error(actual, expected):
    actual, expected = actual.double().cpu(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def _train(folder, *overrides):
    data = folder / "data"
    prepare = (
        f"prepare --source stdlib --tokenizer byte --out {data} --max-documents 60 --validation-fraction 0.1"
    )
    assert main(prepare.split()) == 0
    common = [f"data.train={data}", f"run.root={folder}", "training.log_every=1", "training.steps=40"]
    assert main(["pretrain", "configs/demo.yaml", *common, *overrides, "--nproc", "1"]) == 0
    lines = (folder / "demo" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines if "train/loss" in line]
