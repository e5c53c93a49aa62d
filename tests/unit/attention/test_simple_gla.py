"""Simple gated linear attention, with a decay computed from the hidden state: op, layer and model."""

import copy

import pytest
import torch

from megakernel.attention import WHOLE_SEQUENCE, AttentionInputs, HeadShard, Rotary, build
from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings
from megakernel.ops.simple_gla import simple_gla
from megakernel.parallel import OneProcess
from tests.unit.attention.shards import assert_same_with_gradients, check_shards_and_decoding
from tests.unit.ops.comparing import assert_same

LENGTH, WIDTH = 150, 6
DECAYS = ["gate", "step", "fixed", "none"]
POSITIONS = torch.cat([torch.arange(70), torch.arange(LENGTH - 70)]).expand(2, -1)


def inputs(length=LENGTH):
    draw = torch.Generator().manual_seed(0)
    q, k, v, gate = (
        torch.randn(2, heads, length, width, generator=draw, dtype=torch.float64)
        for heads, width in ((4, WIDTH), (2, WIDTH), (2, WIDTH), (2, 1))
    )
    return q, k, v, gate


@pytest.mark.parametrize("positions", [0, 7, POSITIONS], ids=["row", "continued", "packed"])
def test_chunked_values_and_gradients_equal_the_quadratic_formula(positions):
    q, k, v, gate = inputs()
    state = torch.randn(2, 2, WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tensors = [x.requires_grad_() for x in (q, k, v, gate, state)]

    def run(backend):
        log_decay = torch.nn.functional.logsigmoid(gate[..., 0])
        return simple_gla(q, k, v, log_decay, positions=positions, initial_state=state, backend=backend)

    assert_same(run, tensors, tolerance=1e-10)


@pytest.mark.parametrize("log_decay", [-1e3, -1e6, -torch.inf])
def test_a_decay_that_leaves_nothing_is_a_document_start(log_decay):
    q, k, v, _ = inputs()
    mild = torch.full((2, 2, LENGTH), -0.05)
    expected, expected_state = simple_gla(q, k, v, mild, positions=POSITIONS)
    strong = mild.masked_fill(POSITIONS[:, None] == 0, log_decay)
    out, state = simple_gla(*(x.float() for x in (q, k, v)), strong)
    # float32 sums of up to 64 tokens
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-4)


def test_a_state_in_half_precision_is_summed_in_float32():
    q, k, v, _ = (x.float() for x in inputs())
    state = torch.randn(2, 2, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, expected = (
        simple_gla(q, k, v, torch.tensor(-0.05), positions=7, initial_state=x) for x in (state, state.float())
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_state": torch.zeros(2, 2, WIDTH, 1)}, r"initial_state has shape \(2, 2, 6, 1\); expected"),
        ({"positions": POSITIONS[:, 1:]}, r"positions is torch.int64 of shape \(2, 149\); expected"),
        (
            {"initial_state": torch.zeros(2, 2, WIDTH, WIDTH), "exchange": WHOLE_SEQUENCE.start_prefix},
            "initial_state next to exchange",
        ),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        simple_gla(*inputs()[:3], torch.tensor(-0.05), **options)


def layer(decay, seed=0):
    config = {"mechanism": "simple_gla", "simple_gla": {"decay": decay}}
    return build(config, num_heads=4, num_kv_heads=2, head_dim=WIDTH, seed=seed).double()


def token_by_token(module, decay, tensors, positions):
    """Equations 9.1, 9.3 and 9.4, one sequence, head and token at a time."""
    q, k, v, gate = tensors
    rows = []
    for row in range(len(q)):
        for head in range(q.shape[1]):
            key_head, state = head // 2, torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
            for i in range(q.shape[2]):
                scale = 1.0
                if decay == "none":
                    decay_factor = 1.0
                elif decay == "fixed":
                    decay_factor = 1 - 2.0 ** (-5 - key_head)
                else:
                    logit = gate[row, key_head, i, 0] + module.decay_bias[key_head]
                    decay_factor = torch.sigmoid(logit) ** (1 / 16)
                if decay == "step":
                    scale = torch.log1p(torch.exp(logit))
                    decay_factor = torch.exp(-torch.exp(module.log_decay_rate[key_head]) * scale)
                if positions[row, i] == 0:
                    decay_factor = 0.0
                state = decay_factor * state + scale * torch.outer(k[row, key_head, i], v[row, key_head, i])
                rows.append(q[row, head, i] @ state / WIDTH**0.5)
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("decay", DECAYS)
def test_layer_values_and_gradients_equal_the_recurrence(decay):
    length = 77
    positions = torch.stack([torch.arange(length), torch.cat([torch.arange(66), torch.arange(11)])])
    tensors = [x.requires_grad_() for x in inputs(length)]
    q, k, v, gate = tensors
    module = layer(decay)
    further = gate if module.spec.further else None
    outputs = [
        module(q, k, v, AttentionInputs(positions, further=further)),
        token_by_token(module, decay, tensors, positions),
    ]
    leaves = [*(tensors if module.spec.further else tensors[:3]), *module.parameters()]
    assert_same_with_gradients(outputs, leaves)


def test_initial_decay_rates_and_steps_are_those_of_mamba_2_and_seeded():
    whole = layer("step", seed=4)
    half = build(
        {"preset": "mamba2"}, num_heads=4, num_kv_heads=2, head_dim=WIDTH, seed=4, heads=HeadShard(1, 2)
    )
    rates, steps = whole.log_decay_rate.exp(), torch.nn.functional.softplus(whole.decay_bias)
    assert ((rates >= 1) & (rates <= 16)).all()
    assert ((steps >= 0.001) & (steps <= 0.1)).all()
    assert rates[0] != rates[1]
    for name, parameter in half.named_parameters():
        torch.testing.assert_close(parameter.double(), whole.get_parameter(name)[1:])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["row", "packed"])
@pytest.mark.parametrize("size", [2, 5])
def test_shards_and_decoding_equal_the_whole_sequence(size, positions, decay):
    q, k, v, gate = inputs()
    module = layer(decay)
    rotary = Rotary(WIDTH)
    further = gate if module.spec.further else None
    whole = module(q, k, v, AttentionInputs(positions, rotary=rotary, further=further))
    tensors = (q, k, v) if further is None else (q, k, v, gate)
    check_shards_and_decoding(module, whole, tensors, positions, rotary, size, prompt=(100,))


@pytest.mark.parametrize("update", ["sum", "delta"])
@pytest.mark.parametrize("decay", DECAYS)
def test_a_model_trains_with_gradients_for_its_decay(decay, update):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    attention = {"mechanism": "simple_gla", "simple_gla": {"decay": decay, "update": update}}
    config = Model.model_validate({**sizes, "attention": attention})
    model = LanguageModel(ModelSettings(config, vocab_size=32, mesh=OneProcess(), seed=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 32, (2, 100), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(100).expand(2, -1)
    losses = []
    for _ in range(3):
        loss = model(tokens, positions, tokens.roll(-1, 1), torch.tensor([200]))
        optimizer.zero_grad()
        loss.backward()
        gates = [p.grad for name, p in model.named_parameters() if "further" in name or "decay" in name]
        # The further projection and the mechanism's own parameters, in two layers.
        further = 2 if update == "delta" and decay in ("fixed", "none") else 0
        assert len(gates) == {"gate": 4, "step": 6, "fixed": 0, "none": 0}[decay] + further
        assert all(grad.abs().sum() > 0 for grad in gates)
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    with torch.no_grad():
        whole = model.eval().hidden(tokens, positions)
        first, states = model.extend(tokens[:, :60], positions[:, :60], None)
        rest, _ = model.extend(tokens[:, 60:], positions[:, 60:], states)
    torch.testing.assert_close(torch.cat([first, rest]), whole, rtol=1e-4, atol=1e-5)


def test_a_gate_normalizer_without_a_gate_is_refused():
    config = {"preset": "retnet", "simple_gla": {"gate_logit_normalizer": 8.0}}
    with pytest.raises(ValueError, match=r"gate_logit_normalizer=8\.0 has no effect on decay: fixed"):
        Model.model_validate({"num_layers": 1, "hidden_size": 8, "num_heads": 2, "attention": config})


@pytest.mark.parametrize("length", [256, 1000])
def test_gradients_of_mamba_2s_decay_are_not_rounded_before_they_are_summed(length):
    """In bfloat16 the bias's gradient has the rounding of its own dtype, not of the values times the step."""
    draw, worst = torch.Generator().manual_seed(0), 0.0
    for seed in range(4):
        module = build("mamba2", num_heads=4, head_dim=64, seed=seed).bfloat16()
        shapes = ((64,), (64,), (64,), (1,), (64,))
        tensors = [torch.randn(1, 4, length, *shape, generator=draw).bfloat16() for shape in shapes]
        found = []
        for layer in (module, copy.deepcopy(module).double()):
            q, k, v, gate, grad = (x.to(layer.decay_bias.dtype) for x in tensors)
            out = layer(q, k, v, AttentionInputs(further=gate))
            found.append(torch.autograd.grad(out, layer.decay_bias, grad)[0].double())
        worst = max(worst, ((found[0] - found[1]) / found[1]).abs().max().item())
    # bfloat16 rounds the sum by 2^-9; with values rounded before, single sums were off by 1.4 to 7 percent.
    assert worst < 2**-7
