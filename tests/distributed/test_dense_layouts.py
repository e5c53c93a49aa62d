"""Dense checkpoints over tensor ranks and pipeline stages at once: what they compute, and what reading them takes."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from tests import dense_models
from tests.distributed.ranks import cpu_mesh, run_ranks

LAYERS = 24


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model of each family, and a deeper one that holds many times its largest tensor."""
    folder = tmp_path_factory.mktemp("layouts")
    for name in dense_models.CONFIGS:
        dense_models.save(name, folder / name)
    sizes = dense_models.CONFIGS["llama"].to_dict() | {"num_hidden_layers": LAYERS}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(folder / "deep")
    return folder


@pytest.fixture(scope="module")
def found(place):
    """What each of four ranks has found out: logits by model, and what reading took."""
    return run_ranks(look, 4, place, list(dense_models.CONFIGS))


def look(place, names):
    from megakernel.model import ModelSettings
    from megakernel.training.weight_source import WeightSource
    from megakernel.uptraining.frozen import frozen_model
    from megakernel.uptraining.handed_on import before_head

    with cpu_mesh(tensor=2, pipeline=2) as mesh:

        def read(name):
            source = WeightSource.find("init.from", place / name)
            settings = ModelSettings(source.model(), dense_models.VOCABULARY, mesh)
            return frozen_model(settings, source.model(), source, torch.float32)

        logits = {}
        for name in names:
            model = read(name)
            entering = before_head(model, (tokens(), torch.arange(dense_models.LENGTH)[None]), mesh)
            logits[name] = None if entering is None else model.logits(entering[0])
        return logits, reading(place / "deep", mesh)


def reading(folder, mesh):
    """Bytes that reading a checkpoint into a model allocates at once, of the model's weights, and of the largest."""
    from megakernel.model import LanguageModel, ModelSettings, stage_layers
    from megakernel.training.cut import cuts
    from megakernel.training.universal_load import load_weights
    from megakernel.uptraining.dense import DenseCheckpoint

    checkpoint = DenseCheckpoint(folder)
    settings = ModelSettings(checkpoint.model, dense_models.VOCABULARY, mesh)
    model = LanguageModel(settings, stage_layers(settings))
    shares = cuts(model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        load_weights(model, shares, mesh.tp, checkpoint, checkpoint.names)
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    weights = sum(x.nbytes for x in model.parameters())
    largest = max(4 * torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names)
    return most, weights, largest


def tokens():
    return torch.randint(
        dense_models.VOCABULARY, (1, dense_models.LENGTH), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize("name", dense_models.CONFIGS)
def test_logits_over_tensor_ranks_and_stages_are_those_of_transformers(name, place, found):
    model = AutoModelForCausalLM.from_pretrained(Path(place, name)).eval()
    with torch.no_grad():
        theirs = model(tokens()).logits
    assert [rank[0][name] is None for rank in found] == [True, True, False, False]
    for logits, _ in found[2:]:
        error = (logits[name] - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
        assert error < 1e-4


def test_reading_holds_no_more_than_a_tensor_at_a_time(found):
    for _, (most, weights, largest) in found:
        assert 0 < most < largest < weights / 4
