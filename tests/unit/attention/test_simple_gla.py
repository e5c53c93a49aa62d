"""Simple gated linear attention, whose decay the hidden state names: op, layer and model."""

import pytest
import torch

from megakernel.attention import AttentionInputs, Rotary, build
from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings
from megakernel.ops.simple_gla import simple_gla
from megakernel.parallel import OneProcess
from tests.unit.attention.shards import in_shards

LENGTH, WIDTH = 150, 6
POSITIONS = torch.cat([torch.arange(70), torch.arange(LENGTH - 70)]).expand(2, -1)


def inputs(length=LENGTH):
    draw = torch.Generator().manual_seed(0)
    q, k, v, gate = (
        torch.randn(2, heads, length, width, generator=draw, dtype=torch.float64)
        for heads, width in ((4, WIDTH), (2, WIDTH), (2, WIDTH), (2, 1))
    )
    return q, k, v, gate


@pytest.mark.parametrize("positions", [0, 7, POSITIONS], ids=["row", "continued", "packed"])
def test_chunks_are_the_quadratic_formula_in_values_and_gradients(positions):
    q, k, v, gate = inputs()
    state = torch.randn(2, 2, WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tensors = [x.requires_grad_() for x in (q, k, v, gate, state)]

    def run(backend):
        log_decay = torch.nn.functional.logsigmoid(gate[..., 0])
        out, left = simple_gla(q, k, v, log_decay, positions=positions, initial_state=state, backend=backend)
        loss = out.sin().sum() + left.cos().sum()
        return out, left, *torch.autograd.grad(loss, tensors)

    for found, expected in zip(run("chunked"), run("reference")):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["row", "packed"])
@pytest.mark.parametrize("size", [2, 5])
def test_shards_and_decoding_are_the_whole_sequence(size, positions):
    q, k, v, gate = inputs()
    module = build({"mechanism": "simple_gla"}, num_heads=4, num_kv_heads=2, head_dim=WIDTH).double()
    rotary = Rotary(WIDTH)
    whole = module(q, k, v, AttentionInputs(positions, rotary=rotary, further=gate))

    def part(shard):
        mine = [x.chunk(size, 2)[shard.rank] for x in (q, k, v)]
        at = None if positions is None else positions.chunk(size, 1)[shard.rank]
        further = gate.chunk(size, 2)[shard.rank]
        return module(*mine, AttentionInputs(at, rotary=rotary, cp_shard=shard, further=further))

    torch.testing.assert_close(torch.cat(in_shards(size, part), 2), whole, rtol=1e-10, atol=1e-10)

    state, outputs = None, []
    for start, end in ((0, 100), *((i, i + 1) for i in range(100, LENGTH))):
        at = None if positions is None else positions[:, start:end]
        tokens = (x[:, :, start:end] for x in (q, k, v))
        out, state = module.extend(*tokens, state, positions=at, rotary=rotary, further=gate[:, :, start:end])
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=1e-10, atol=1e-10)


def test_a_model_of_it_trains_and_its_decay_depends_on_the_token():
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    form = Model.model_validate({**sizes, "attention": {"mechanism": "simple_gla"}})
    model = LanguageModel(ModelSettings(form, vocab_size=32, mesh=OneProcess(), seed=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 32, (2, 100), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100).expand(2, -1)
    losses = []
    for _ in range(3):
        loss = model(tokens, positions, tokens.roll(-1, 1), torch.tensor([200]))
        optimizer.zero_grad()
        loss.backward()
        gates = [p.grad for name, p in model.named_parameters() if "further" in name or "decay" in name]
        assert len(gates) == 4
        assert all(grad.abs().sum() > 0 for grad in gates)
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    with torch.no_grad():
        whole = model.eval().hidden(tokens, positions)
        first, states = model.extend(tokens[:, :60], positions[:, :60], None)
        rest, _ = model.extend(tokens[:, 60:], positions[:, 60:], states)
    torch.testing.assert_close(torch.cat([first, rest]), whole, rtol=1e-4, atol=1e-5)
