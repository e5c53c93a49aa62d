"""A whole language model has the same loss and gradients with and without Liger-Kernel."""

import pytest
import torch

from megakernel.config import Model, Parallel
from megakernel.model import IGNORED, LanguageModel, ModelSettings
from megakernel.ops import dispatch
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.processes import ProcessEnvironment

from .comparing import DEVICE, rms_ratio
from .completed_interpreter import complete

PARTS = {
    "rms_norm",
    "rms_norm_and_residual",
    "add_rms_norm",
    "layer_norm",
    "swiglu",
    "rotate",
    "cross_entropy",
}
CONFIGS = {
    "Llama's": ({"norm": "rmsnorm", "activation": "swiglu"}, PARTS - {"layer_norm"}),
    "with biases": (
        {"norm": "layernorm", "activation": "swiglu", "bias": True},
        PARTS - {"rms_norm", "rms_norm_and_residual", "add_rms_norm"},
    ),
    "GPT's": (
        {"norm": "layernorm", "activation": "gelu", "bias": True, "position": "sinusoidal"},
        {"layer_norm", "cross_entropy"},
    ),
    "untied, shared keys": ({"tie_embeddings": False, "num_kv_heads": 2}, PARTS - {"layer_norm"}),
}


@pytest.fixture(scope="module")
def mesh():
    mesh = Mesh.create(Parallel(), ProcessEnvironment(), prepare_device("auto", 0))
    yield mesh
    mesh.destroy()


@pytest.mark.parametrize("config", CONFIGS)
def test_model_is_the_same_with_liger(config, mesh, monkeypatch):
    if DEVICE == "cpu":
        complete(monkeypatch)
    sizes, expected = CONFIGS[config]
    model = Model(
        num_layers=2,
        hidden_size=16,
        num_heads=4,
        ffn_hidden_size=24,
        vocab_multiple=8,
        attention="linear",
        **sizes,
    )
    settings = ModelSettings(model, vocab_size=40, mesh=mesh, loss_chunk_size=8)
    network = LanguageModel(settings).to(DEVICE)
    draw = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(40, (2, 11), generator=draw).to(DEVICE) for _ in range(2))
    labels[0, 3:5] = IGNORED
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]]).to(
        DEVICE
    )

    def train():
        loss = network(tokens, positions, labels, torch.tensor([20], device=DEVICE))
        return loss, torch.autograd.grad(loss, list(network.parameters()))

    monkeypatch.setenv(dispatch.VARIABLE, "chunked")
    right, slopes = train()
    taken = set()

    def fastest(implementations, *args, **options):
        """Dispatch as on a GPU with Liger-Kernel, but without our own kernels."""
        if dispatch.LIBRARY not in implementations:
            return implementations[dispatch.EVERYWHERE](*args, **options)
        taken.add(implementations[dispatch.LIBRARY].function)
        return implementations[dispatch.LIBRARY](*args, **options)

    monkeypatch.delenv(dispatch.VARIABLE)
    monkeypatch.setattr(dispatch, "_fastest", fastest)
    loss, found = train()
    assert taken == expected
    # float32 sums in another order; the same tolerance as for layouts.
    assert loss.item() == pytest.approx(right.item(), rel=1e-5)
    for actual, exact in zip(found, slopes, strict=True):
        assert rms_ratio(actual, exact) <= 1e-4
