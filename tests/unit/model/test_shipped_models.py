"""Every shipped model builds without memory for its weights and has the counted number of parameters."""

from pathlib import Path

import pytest
import torch

from megakernel.config import load
from megakernel.model import LanguageModel, ModelSettings
from megakernel.model.parameters import parameter_count
from megakernel.parallel import OneProcess

ROOT = Path(__file__).parents[3]
GPT2_VOCAB = 50_257
SEQ_LEN = 8192
RUN = [
    "data.train=none",
    "run.name=x",
    "training.steps=1",
    f"training.seq_len={SEQ_LEN}",
    "training.global_batch_size=1",
]


@pytest.fixture(scope="module")
def counts():
    """Model -> its number of parameters when built on the meta device, and by the formula."""
    found = {}
    for path in (ROOT / "configs" / "model").glob("*.yaml"):
        model = load(path, RUN).model
        with torch.device("meta"):
            built = LanguageModel(ModelSettings(model, GPT2_VOCAB, OneProcess(), shapes_only=True))
        assert all(parameter.is_meta for parameter in built.parameters())
        count = sum(parameter.numel() for parameter in built.parameters())
        found[path.stem] = count, parameter_count(model, GPT2_VOCAB, SEQ_LEN)
    assert len(found) == 13
    return found


def test_every_shipped_model_builds_on_the_meta_device(counts):
    for name, (built, formula) in counts.items():
        assert built == formula, name


def test_shipped_models_have_the_size_of_their_name(counts):
    for name, (built, _) in counts.items():
        size = name.partition("-")[0]
        stated = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
        # Every fourth layer of these has an output gate.
        has_gates = name.endswith(("-hybrid", "-selected"))
        assert built == pytest.approx(stated, rel=0.06 if has_gates else 0.05), name


def test_flurka_and_softmax_twins_have_almost_equal_sizes(counts):
    for name in ("125m", "350m", "1b", "7b"):
        # they differ by gates, landmarks and feature maps
        assert counts[name][0] == pytest.approx(counts[f"{name}-softmax"][0], rel=0.01)
