"""Options that bound the memory of activations: recomputation, its offload, and the MLP in chunks of tokens."""

from contextlib import nullcontext

import pytest
import torch

from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import OneProcess
from tests.unit.generation.small_models import with_random_weights

TOKENS = 24
MODEL = Model(num_layers=2, hidden_size=16, num_heads=2, vocab_multiple=8, attention="linear")


def network(**options):
    return with_random_weights(
        LanguageModel(ModelSettings(MODEL, vocab_size=40, mesh=OneProcess(), **options))
    )


def batch():
    tokens, labels = torch.randint(40, (2, 1, TOKENS), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(TOKENS)[None], labels, torch.tensor([TOKENS])


def gradients(network):
    network.token_embedding.tokens.weight.requires_grad_(False)
    network(*batch()).backward()
    return {name: x.grad for name, x in network.named_parameters() if x.requires_grad}


def test_layers_behind_a_frozen_embedding_have_gradients_with_offload():
    expected, found = (gradients(network(recompute="full", offload=offload)) for offload in (False, True))
    assert None not in expected.values()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_frozen_layers_before_the_first_trained_one_are_not_recomputed():
    model, runs = network(recompute="full", offload=True), []
    for layer in model.layers[1:3]:
        layer.mlp.register_forward_pre_hook(lambda _, inputs: runs.append(inputs))
    for layer in model.layers[:2]:
        layer.requires_grad_(False)
    model(*batch()).backward()
    assert len(runs) == 1 + 2


@pytest.mark.parametrize("mode", ["evaluation", "without gradients", "forward of offloaded layers"])
def test_the_mlp_runs_in_chunks_without_gradients_too(mode):
    size, seen = 5, []
    model = network(
        mlp_chunk_size=size, **({"recompute": "full", "offload": True} if "offload" in mode else {})
    )
    for layer in model.layers[1:3]:
        layer.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    model.train(mode != "evaluation")
    with nullcontext() if "offload" in mode else torch.no_grad():
        model.hidden(*batch()[:2])
    assert seen == [5, 5, 5, 5, 4] * 2


def test_recomputed_layers_get_the_same_positions():
    """Tables that layers share are cached for the tensor of positions itself, not for a copy."""
    model, seen = network(recompute="full", offload=True), []
    for layer in model.layers[1:3]:
        layer.self_attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    tokens, positions, *rest = batch()
    model(tokens, positions, *rest).backward()
    assert len(seen) == 4
    assert all(x is positions for x in seen)
