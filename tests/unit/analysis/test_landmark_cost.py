import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megakernel.config import Attention
from megakernel.config.mechanisms import Shape
from megakernel.ops.nystrom_attention import depthwise_convolution, nystrom_attention
from megakernel.ops.skyformer_attention import skyformer_attention

LENGTH, WIDTH, COUNT = 96, 8, 12


def formula(name: str, **settings) -> dict[str, float]:
    form = Attention.model_validate({"mechanism": name, name: settings})
    return form.spec.flops(Shape(1, 1, WIDTH, WIDTH, causal=False, length=LENGTH))


def executed(run) -> float:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() / LENGTH


@pytest.fixture
def head():
    return [torch.randn(1, 1, LENGTH, WIDTH) for _ in range(3)]


def test_skyformer_executes_the_formula(head):
    rows = torch.arange(COUNT)
    needed = formula("skyformer", features=COUNT)
    assert executed(lambda: skyformer_attention(*head, landmarks=rows)) == sum(needed.values())


def test_nystromformer_executes_the_formula_and_means_as_products(head):
    needed = formula("nystromformer", landmarks=COUNT)
    segments = torch.arange(LENGTH)[None] * COUNT // LENGTH
    means = 2 * 2 * COUNT * WIDTH
    run = executed(lambda: nystrom_attention(*head, segments=segments, count=COUNT))
    assert run == sum(needed.values()) + means


def test_a_convolution_executes_the_formula(head):
    needed = formula("nystromformer", landmarks=COUNT, conv_kernel=5)["convolution"]
    assert executed(lambda: depthwise_convolution(head[2], torch.randn(1, 5))) == needed
