"""What a token costs beside its arithmetic: operations of torch and calls of Python, which no load changes."""

import sys
from functools import partial

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel.generation.decoding import Decoder
from tests.unit.generation.small_models import BLOCKS, build

EOD = 60
MODELS = {
    "flurka": ({"preset": "flurka", **BLOCKS}, 105, 240),
    "softmax": ("softmax", 70, 165),
    "local": ("local", 52, 160),
    "linear": ("linear", 103, 218),
    "retnet": ("retnet", 79, 192),
}
"""Attention, and the operations and calls of a layer at most: a tenth above those of texts of other lengths."""

ROWS = {"one text": [66], "texts that stand alike": [66, 66], "texts of other lengths": [66, 41]}


class Operations(TorchDispatchMode):
    """Counts what torch runs."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def decoder(model, lengths):
    """Of texts that have begun."""
    whole = Decoder(model, EOD, isolate_documents=True)
    for length in lengths:
        one = Decoder(model, EOD, isolate_documents=True)
        one.read([[place % EOD for place in range(length)]])
        if whole.states is None:
            whole = one
        else:
            whole.append(one)
    return whole


def operations(step):
    with Operations() as seen:
        step()
    return seen.count


def calls(step):
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def of_a_layer(count, attention, lengths):
    """What a layer adds to a token."""
    found = []
    for layers in (2, 4):
        started = decoder(build(attention=attention, num_layers=layers), lengths)
        step = partial(started.read, [[1]] * len(lengths))
        step()  # tables are made
        found.append(count(step))
    return (found[1] - found[0]) / 2


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("attention", "most_operations", "most_calls"), MODELS.values(), ids=MODELS)
def test_a_token_costs_a_layer_few_operations_and_calls(attention, most_operations, most_calls, lengths):
    assert of_a_layer(operations, attention, lengths) <= most_operations
    assert of_a_layer(calls, attention, lengths) <= most_calls
