"""The gated delta rule: op and layer against its formula, token by token."""

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

from megakernel.attention import AttentionInputs, Rotary, build
from megakernel.ops.gated_delta_rule import gated_delta_rule
from tests.unit.attention.shards import assert_same_with_gradients, check_shards_and_decoding
from tests.unit.ops.comparing import assert_same

LENGTH, WIDTH, VALUES = 150, 6, 5
POSITIONS = torch.cat([torch.arange(70), torch.arange(LENGTH - 70)]).expand(2, -1)


def random_tensors(*shapes):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("positions", [0, 7, POSITIONS], ids=["row", "continued", "packed"])
def test_chunked_values_and_gradients_equal_the_recurrence(positions):
    q, k, v, gate, logits, state = tensors = random_tensors(
        (2, 4, LENGTH, WIDTH), (2, 2, LENGTH, WIDTH), (2, 2, LENGTH, VALUES),
        (2, 2, LENGTH), (2, 2, LENGTH), (2, 2, WIDTH, VALUES),
    )  # fmt: skip
    for x in tensors:
        x.requires_grad_()

    def run(backend):
        unit = k / k.norm(dim=-1, keepdim=True)
        numbers = logsigmoid(gate), logits.sigmoid()
        return gated_delta_rule(
            q, unit, v, *numbers, positions=positions, initial_state=state, backend=backend
        )

    assert_same(run, tensors, tolerance=1e-10)


def test_a_decay_that_leaves_nothing_is_a_document_start():
    q, k, v, logits = random_tensors(
        (2, 4, LENGTH, WIDTH), (2, 2, LENGTH, WIDTH), (2, 2, LENGTH, VALUES), (2, 2, LENGTH)
    )
    tensors = (q, k / k.norm(dim=-1, keepdim=True), v)
    mild = torch.full((2, 2, LENGTH), -0.05)
    expected = gated_delta_rule(*tensors, mild, logits.sigmoid(), positions=POSITIONS)
    strong = mild.masked_fill(POSITIONS[:, None] == 0, -1e6)
    found = gated_delta_rule(*(x.float() for x in tensors), strong, logits.sigmoid())
    for one, other in zip(found, expected):
        # float32 sums of up to 64 tokens
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def layer(decay="step"):
    config = {"mechanism": "simple_gla", "simple_gla": {"update": "delta", "decay": decay}}
    return build(config, num_heads=4, num_kv_heads=2, head_dim=WIDTH).double()


def inputs(length=LENGTH):
    return random_tensors(
        (2, 4, length, WIDTH), (2, 2, length, WIDTH), (2, 2, length, WIDTH), (2, 2, length, 2)
    )


def token_by_token(module, q, k, v, further, positions):
    """The state D x d of the papers, S_t = S_(t-1) a_t (I - b_t k_t k_t^T) + b_t v_t k_t^T, and o_t = S_t q_t."""
    rows = []
    for row in range(len(q)):
        for head in range(q.shape[1]):
            key_head, state = head // 2, torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
            for i in range(q.shape[2]):
                logit, strength = further[row, key_head, i]
                rate = module.log_decay_rate[key_head].exp()
                decay_factor = torch.exp(-rate * softplus(logit + module.decay_bias[key_head]))
                if positions[row, i] == 0:
                    decay_factor = 0.0
                b = torch.sigmoid(strength)
                query, key = (x / (x @ x + 1e-6).sqrt() for x in (q[row, head, i], k[row, key_head, i]))
                projection = torch.eye(WIDTH, dtype=torch.float64) - b * torch.outer(key, key)
                state = decay_factor * state @ projection + b * torch.outer(v[row, key_head, i], key)
                rows.append(state @ query / WIDTH**0.5)
    return torch.stack(rows).view(q.shape)


def test_layer_values_and_gradients_equal_the_recurrence():
    length = 77
    positions = torch.stack([torch.arange(length), torch.cat([torch.arange(66), torch.arange(11)])])
    tensors = [x.requires_grad_() for x in inputs(length)]
    q, k, v, further = tensors
    module = layer()
    outputs = [
        module(q, k, v, AttentionInputs(positions, further=further)),
        token_by_token(module, *tensors, positions),
    ]
    assert_same_with_gradients(outputs, [*tensors, *module.parameters()])


@pytest.mark.parametrize("decay", ["step", "gate", "fixed"])
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["row", "packed"])
def test_shards_and_decoding_equal_the_whole_sequence(positions, decay):
    *tensors, further = inputs()
    rotary, module = Rotary(WIDTH), layer(decay)
    tensors = [x.requires_grad_() for x in (*tensors, further[..., : module.spec.further])]
    q, k, v, further = tensors
    whole = module(q, k, v, AttentionInputs(positions, rotary=rotary, further=further))
    check_shards_and_decoding(module, whole, tensors, positions, rotary, size=5, prompt=(100,))


def test_a_second_value_for_a_key_replaces_the_first():
    (values,) = random_tensors((1, 1, 3, VALUES))
    keys = torch.eye(WIDTH, dtype=torch.float64)[[0, 1, 0]].view(1, 1, 3, WIDTH)
    out, _ = gated_delta_rule(keys, keys, values, torch.zeros(()).double(), torch.ones(()).double())
    # q and k are the same unit vector: the output is the last value written for it, divided by sqrt(d).
    torch.testing.assert_close(out, values / WIDTH**0.5)
