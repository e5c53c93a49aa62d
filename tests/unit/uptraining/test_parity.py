"""When logits are not compared with those of transformers."""

import json
import math

import pytest
import torch

from megakernel.config import UserError
from megakernel.training.weight_source import WeightSource
from megakernel.uptraining.dense import DenseCheckpoint
from megakernel.uptraining.identity import Identity
from megakernel.uptraining.parity import Parity, too_large
from megakernel.uptraining.preflight import Preflight, check
from tests import dense_models
from tests.unit.config import trees


def test_a_reference_that_fills_more_than_half_of_the_free_memory_is_not_loaded(tmp_path):
    model = dense_models.save("llama", tmp_path)
    checkpoint, parameters = DenseCheckpoint(tmp_path), model.num_parameters()
    assert too_large(checkpoint, torch.float32, 8 * parameters) == ""
    assert "would need 0.0 GiB on one process" in too_large(checkpoint, torch.float32, 8 * parameters - 1)
    assert too_large(checkpoint, torch.bfloat16, 4 * parameters) == ""


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"parity": Parity(math.nan)}, "its logits are not finite"),
        (
            {"identity": Identity(64, 2.5, 2.4)},
            r"first 64 tokens of each row it loses 2.5000 .*model.hidden_size=32",
        ),
        ({"swapped": (math.nan, 0.0)}, "its loss is nan before any step"),
    ],
)
def test_what_ends_a_run_before_its_first_step(wrong, reason, tmp_path):
    good = Preflight(Parity(None, "a run"), None, dense=(2.0, 2.0), swapped=(3.0, 3.0), sliding=None)
    dense_models.save("llama", tmp_path)
    config, source = trees.config(), WeightSource("init.from", tmp_path, None)
    check(good, config, source)
    with pytest.raises(UserError, match=reason):
        check(good._replace(**wrong), config, source)


def test_it_is_read_as_it_was_written():
    found = Preflight(Parity(1e-6), Identity(64, 2.5, 2.4), (2.0, 2.0), (3.0, 3.0), None)
    read = Preflight.read(json.loads(json.dumps(found._asdict())))
    assert (read.parity.difference, read.identity.dense, list(found.swapped)) == (1e-6, 2.4, read.swapped)
