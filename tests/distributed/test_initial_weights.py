"""Initial weights and biases of every kind are the same on any layout."""

import pytest
import torch

from megakernel.config import Model
from megakernel.model.layer import TransformerLayer
from megakernel.model.settings import ModelSettings
from tests.distributed.processes import cpu_mesh, run_ranks

SIZES = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 32, "activation": "swiglu"}
SIZES |= {"bias": True, "qkv_bias": True, "attention": "softmax"}


def layers(tensor):
    """The parameters of a layer with each kind of initial weights."""
    with cpu_mesh(tensor=tensor) as mesh:
        built = {
            init: TransformerLayer(ModelSettings(Model(**SIZES, init=init), 8, mesh, seed=1), 0)
            for init in ("normal", "uniform", "xavier")
        }
        return {
            init: {name: weight.detach() for name, weight in layer.named_parameters()}
            for init, layer in built.items()
        }


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(layers, 1, 1)[0]


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(layers, 2, 2)


@pytest.mark.parametrize("init", ["normal", "uniform", "xavier"])
def test_tensor_parallel_ranks_have_the_parts_of_one_process(init, one_process, two_ranks):
    first, second = (rank[init] for rank in two_ranks)
    for name, whole in one_process[init].items():
        parts = [first[name], second[name]]
        if parts[0].shape == whole.shape:
            assert all(torch.equal(part, whole) for part in parts), name
        elif "linear_fc1" in name:  # gate and up are partitioned each
            halves = [torch.cat(half) for half in zip(*(part.chunk(2) for part in parts), strict=True)]
            assert torch.equal(torch.cat(halves), whole), name
        else:
            assert torch.equal(torch.cat(parts, 1 if parts[0].shape[0] == whole.shape[0] else 0), whole), name
    assert one_process["uniform"]["self_attention.qkv.bias"].any()
