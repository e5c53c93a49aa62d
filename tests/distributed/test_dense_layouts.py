"""Dense checkpoints over tensor ranks and pipeline stages: their logits and losses, and the memory to read them."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from tests import dense_models
from tests.dense_models import tokens
from tests.distributed.processes import cpu_mesh, run_ranks

pytestmark = pytest.mark.second

LAYERS = 24


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with a model of each family, and a deep one that is many times larger than its largest tensor."""
    folder = tmp_path_factory.mktemp("layouts")
    for name in dense_models.CONFIGS:
        dense_models.save(name, folder / name)
    sizes = dense_models.CONFIGS["llama"].to_dict() | {"num_hidden_layers": LAYERS}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(folder / "deep")
    return folder


@pytest.fixture(scope="module")
def results(checkpoints):
    """Of each of four ranks: logits and losses by model, and the memory that reading took."""
    return run_ranks(evaluate_and_read, 4, checkpoints, list(dense_models.CONFIGS))


def evaluate_and_read(checkpoints, names):
    from megakernel.checkpoint.frozen import frozen_model, head_inputs
    from megakernel.checkpoint.weight_source import WeightSource
    from megakernel.model import ModelSettings
    from megakernel.model.head import token_losses

    with cpu_mesh(tensor=2, pipeline=2) as mesh:

        def read(name):
            source = WeightSource.find("init.from", checkpoints / name)
            model_config = source.model().for_seq_len(dense_models.LENGTH)
            settings = ModelSettings(model_config, model_config.vocab_size, mesh)
            return frozen_model(settings, source.model(), source, torch.float32)

        outputs = dict.fromkeys(names)
        for name in names:
            model = read(name)
            layer_inputs = tokens(), torch.arange(dense_models.LENGTH)[None], labels(name), torch.ones(1)
            if (entering := head_inputs(model, layer_inputs, mesh)) is not None:
                losses = token_losses(model.output_matrix, entering[0], labels(name), model.settings)
                outputs[name] = model.logits(entering[0]), model.loss(entering), losses.sum()
        return outputs, read_memory(checkpoints / "deep", mesh)


def read_memory(folder, mesh):
    """Bytes: the peak while a checkpoint is read into a model, the model's weights, and the largest weight."""
    from megakernel.checkpoint.dense import DenseCheckpoint
    from megakernel.checkpoint.sharded_load import load_weights
    from megakernel.checkpoint.whole_tensors import partitions
    from megakernel.model import LanguageModel, ModelSettings, stage_layers

    checkpoint = DenseCheckpoint(folder)
    settings = ModelSettings(checkpoint.model, dense_models.VOCABULARY, mesh)
    model = LanguageModel(settings, stage_layers(settings))
    shares = partitions(model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        load_weights(model, shares, mesh.tp, checkpoint, checkpoint.names)
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    weights = sum(x.nbytes for x in model.parameters())
    largest = max(4 * torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names)
    return peak, weights, largest


def labels(name):
    """Labels with the last id of the vocabulary among them, which is next to the padding."""
    last = dense_models.CONFIGS[name].vocab_size - 1
    return tokens().roll(-1, 1).index_fill(1, torch.arange(3), last)


@pytest.mark.parametrize("name", dense_models.CONFIGS)
def test_logits_and_losses_over_tensor_and_pipeline_ranks_match_transformers(name, checkpoints, results):
    model = AutoModelForCausalLM.from_pretrained(Path(checkpoints, name)).eval()
    with torch.no_grad():
        reference = model(tokens()).logits
    loss = F.cross_entropy(reference[0], labels(name)[0], reduction="sum").item()
    assert [rank[0][name] is None for rank in results] == [True, True, False, False]
    for outputs, _ in results[2:]:
        logits, *losses = outputs[name]
        error = (logits - reference).square().mean().sqrt() / reference.square().mean().sqrt()
        assert error < 1e-4
        assert [x.item() for x in losses] == pytest.approx([loss, loss], rel=1e-5)


def test_reading_a_checkpoint_holds_at_most_one_tensor_at_a_time(results):
    for _, (peak, weights, largest) in results:
        assert 0 < peak < largest < weights / 4
