"""Parity of logits with transformers, and when it cannot be measured."""

import json
import math
import re
import resource
from contextlib import contextmanager

import pytest
import torch

from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.parity import Parity, compare_logits, synthetic_tokens, why_too_large
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import UserError
from megakernel.parallel.device import is_out_of_memory
from megakernel.uptraining.identity import Identity, Preflight, check_preflight
from tests import dense_models
from tests.unit.config import trees


def test_a_reference_larger_than_half_of_the_free_memory_is_not_loaded(tmp_path):
    model = dense_models.save("llama", tmp_path)
    checkpoint, parameters = DenseCheckpoint(tmp_path), model.num_parameters()
    assert why_too_large(checkpoint, 8 * parameters) == ""
    assert "would need 0.0 GiB on one process" in why_too_large(checkpoint, 8 * parameters - 1)


def test_out_of_memory_in_transformers_is_not_reported_as_a_mismatch(tmp_path):
    model, tokens = dense_models.save("llama", tmp_path), synthetic_tokens(8, 384, torch.device("cpu"))
    with torch.no_grad():
        assert compare_logits(model(tokens).logits, "init.from", tmp_path).difference < 1e-6
    with memory_exhausted():
        found = compare_logits(torch.ones(1, 8, 384), "init.from", tmp_path)
    assert found.difference is None
    assert re.match(r"transformers ran out of memory \(.*[Cc]annot allocate memory", found.reason)
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 50)
    assert is_out_of_memory(error.value)
    assert not is_out_of_memory(RuntimeError("size mismatch"))


@contextmanager
def memory_exhausted():
    """This process gets no further address space: not even files can be mapped."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (resource.getpagesize(), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parity": Parity(math.nan)}, "its logits are not finite"),
        (
            {"identity": Identity(64, 2.5, 2.4)},
            r"first 64 tokens of each sequence its loss is 2.5000 .*model.hidden_size=32",
        ),
        ({"swapped": (math.nan, 0.0)}, "its loss is nan before any step"),
    ],
)
def test_a_failed_preflight_check_ends_the_run(changes, reason, tmp_path):
    good = Preflight(Parity(None, "a run"), None, dense=(2.0, 2.0), swapped=(3.0, 3.0), sliding=None)
    dense_models.save("llama", tmp_path)
    config, source = trees.config(), WeightSource("init.from", tmp_path, None)
    check_preflight(good, config, source)
    with pytest.raises(UserError, match=reason):
        check_preflight(good._replace(**changes), config, source)


def test_preflight_results_round_trip_through_json():
    found = Preflight(Parity(1e-6), Identity(64, 2.5, 2.4), (2.0, 2.0), (3.0, 3.0), None)
    read = Preflight.from_json(json.loads(json.dumps(found._asdict())))
    assert (read.parity.difference, read.identity.dense, list(found.swapped)) == (1e-6, 2.4, read.swapped)
