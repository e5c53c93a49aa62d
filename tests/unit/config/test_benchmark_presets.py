"""Every encoder preset on every shipped file of the Long Range Arena and of GLUE, as their studies train them."""

from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.experiments.runs import make_run
from benchmarks.experiments.study import read_study
from megakernel.config import PRESETS, Attention, ConfigError, expand_preset
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import OneProcess
from tests.tiers import tiered

CONFIGS = Path(__file__).parents[3] / "configs"
STUDIES = ("lra_kl", "lra_skyformer", "lra_mgk", "lra_flurka", "glue_kl", "glue_flurka")
FILES = [(study, task) for study in STUDIES for task in read_study(study).study.variants]
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
    shipped = {
        path.resolve()
        for path in CONFIGS.glob("*/*/*.yaml")
        if path.parts[-3] in ("lra", "glue") and path.stem not in ("base", "pretrain")
    }
    assert {read_study(study).config_file(task).resolve() for study, task in FILES} == shipped
    assert len(shipped) == 36


@pytest.mark.parametrize(
    ("study", "task"), tiered(FILES, [("lra_kl", "image"), ("lra_skyformer", "listops")])
)
def test_every_encoder_loads_and_builds_with_the_papers_sizes(study, task):
    refused = {}
    for preset in ENCODERS:
        try:
            config = make_run(read_study(study), preset, task, 0).config
        except ConfigError as error:
            refused[preset] = str(error)
            continue
        assert config.model.attention.mechanism == Attention.model_validate(expand_preset(preset)).mechanism
        assert built(config.model, config.training.seq_len) > 0
    assert not refused
