"""Overhead of decoding a token: numbers of torch operations and Python calls, which do not depend on machine load."""

import sys
from functools import partial

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel.generation.decoding import Decoder
from tests.unit.generation.small_models import BLOCKS, build

EOD = 60
MODELS = {
    "flurka": ({"preset": "flurka", **BLOCKS}, 105, 250),
    "softmax": ("softmax", 70, 165),
    "local": ("local", 52, 160),
    "linear": ("linear", 103, 218),
    "retnet": ("retnet", 81, 192),
}
"""Attention, and limits on operations and calls per layer: a tenth above those for texts of unequal lengths."""

TEXT_LENGTHS = {"one text": [66], "texts that stand alike": [66, 66], "texts of other lengths": [66, 41]}


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def decoder(model, lengths):
    """A decoder that has read texts of these lengths."""
    combined = Decoder(model, EOD, isolate_documents=True)
    for length in lengths:
        single = Decoder(model, EOD, isolate_documents=True)
        single.read([[index % EOD for index in range(length)]])
        if combined.states is None:
            combined = single
        else:
            combined.append(single)
    return combined


def operations(step):
    with Operations() as operations_run:
        step()
    return operations_run.count


def calls(step):
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def cost_per_layer(count, attention, lengths):
    """The cost that one layer adds to a token."""
    found = []
    for layers in (2, 4):
        started = decoder(build(attention=attention, num_layers=layers), lengths)
        step = partial(started.read, [[1]] * len(lengths))
        step()  # builds tables that later steps reuse
        found.append(count(step))
    return (found[1] - found[0]) / 2


@pytest.mark.parametrize("lengths", TEXT_LENGTHS.values(), ids=TEXT_LENGTHS)
@pytest.mark.parametrize(("attention", "most_operations", "most_calls"), MODELS.values(), ids=MODELS)
def test_decoding_a_token_needs_few_operations_and_calls_per_layer(
    attention, most_operations, most_calls, lengths
):
    assert cost_per_layer(operations, attention, lengths) <= most_operations
    assert cost_per_layer(calls, attention, lengths) <= most_calls
