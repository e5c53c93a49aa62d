"""Dense checkpoints over tensor ranks and pipeline stages at once: what they compute, and what reading them takes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from tests import dense_models
from tests.dense_models import tokens
from tests.distributed.processes import cpu_mesh, run_ranks

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
    """What each of four ranks has found out: logits and losses by model, and what reading took."""
    return run_ranks(look, 4, place, list(dense_models.CONFIGS))


def look(place, names):
    from megakernel.checkpoint.frozen import frozen_model, head_inputs
    from megakernel.checkpoint.weight_source import WeightSource
    from megakernel.model import ModelSettings
    from megakernel.model.head import token_losses

    with cpu_mesh(tensor=2, pipeline=2) as mesh:

        def read(name):
            source = WeightSource.find("init.from", place / name)
            wanted = source.model().for_seq_len(dense_models.LENGTH)
            settings = ModelSettings(wanted, wanted.vocab_size, mesh)
            return frozen_model(settings, source.model(), source, torch.float32)

        said = dict.fromkeys(names)
        for name in names:
            model = read(name)
            layer_inputs = tokens(), torch.arange(dense_models.LENGTH)[None], labels(name), torch.ones(1)
            if (entering := head_inputs(model, layer_inputs, mesh)) is not None:
                losses = token_losses(model.output_matrix, entering[0], labels(name), model.settings)
                said[name] = model.logits(entering[0]), model.loss(entering), losses.sum()
        return said, reading(place / "deep", mesh)


def reading(folder, mesh):
    """Bytes that reading a checkpoint into a model allocates at once, of the model's weights, and of the largest."""
    from megakernel.checkpoint.dense import DenseCheckpoint
    from megakernel.checkpoint.universal import partitions
    from megakernel.checkpoint.universal_load import load_weights
    from megakernel.model import LanguageModel, ModelSettings, stage_layers

    checkpoint = DenseCheckpoint(folder)
    settings = ModelSettings(checkpoint.model, dense_models.VOCABULARY, mesh)
    model = LanguageModel(settings, stage_layers(settings))
    shares = partitions(model)
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


def labels(name):
    """The last word among them, which lies before the rows that pad a vocabulary."""
    last = dense_models.CONFIGS[name].vocab_size - 1
    return tokens().roll(-1, 1).index_fill(1, torch.arange(3), last)


@pytest.mark.parametrize("name", dense_models.CONFIGS)
def test_logits_and_losses_over_tensor_ranks_and_stages_are_those_of_transformers(name, place, found):
    model = AutoModelForCausalLM.from_pretrained(Path(place, name)).eval()
    with torch.no_grad():
        theirs = model(tokens()).logits
    loss = F.cross_entropy(theirs[0], labels(name)[0], reduction="sum").item()
    assert [rank[0][name] is None for rank in found] == [True, True, False, False]
    for said, _ in found[2:]:
        logits, *losses = said[name]
        error = (logits - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
        assert error < 1e-4
        assert [x.item() for x in losses] == pytest.approx([loss, loss], rel=1e-5)


def test_reading_holds_no_more_than_a_tensor_at_a_time(found):
    for _, (most, weights, largest) in found:
        assert 0 < most < largest < weights / 4
