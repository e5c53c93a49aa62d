"""Every encoder preset on every shipped file of the Long Range Arena and of GLUE, as `benchmarks.lra` trains them."""

from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.lra import overrides_of
from megakernel.config import PRESETS, Attention, ConfigError, expand_preset, load
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import OneProcess
from tests.tiers import tiered

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = {
    "/".join(path.with_suffix("").parts[-3:]): path
    for folder in ("lra", "glue")
    for path in sorted(CONFIGS.glob(f"{folder}/*/*.yaml"))
    if path.stem != "base"
}
ENCODERS = [name for name in PRESETS if not Attention.model_validate(expand_preset(name)).looks_back_only]


@cache
def built(model, seq_len):
    """Parameters of one layer of the model, built without memory for its weights."""
    one = model.model_copy(update={"num_layers": 1, "max_positions": model.max_positions or seq_len})
    with torch.device("meta"):
        layers = LanguageModel(ModelSettings(one, 100, OneProcess(), shapes_only=True))
    return sum(parameter.numel() for parameter in layers.parameters())


def test_there_are_encoders_and_files_of_four_papers_settings():
    assert {"linformer", "flurka_performer", "flurka_rnn", "flurka_eva", "skyformer"} <= set(ENCODERS)
    assert {path.parent.name for path in FILES.values()} == {"kl", "skyformer", "flurka"}
    assert len(FILES) == 30


@pytest.mark.parametrize("name", tiered(FILES, ["lra/kl/image", "lra/skyformer/listops"]))
def test_every_encoder_loads_and_builds_with_the_papers_sizes(name):
    path = FILES[name]
    refused = {}
    for preset in ENCODERS:
        try:
            config = load(path, overrides_of(path, preset, 0, []))
        except ConfigError as error:
            refused[preset] = str(error)
            continue
        assert config.model.attention.mechanism == Attention.model_validate(expand_preset(preset)).mechanism
        assert built(config.model, config.training.seq_len) > 0
    assert not refused
