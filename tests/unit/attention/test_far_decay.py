"""FLuRKA's landmarks that decay at the ends of blocks, against the formula, token by token."""

import pytest
import torch

from megakernel.attention import AttentionInputs, Rotary, build
from megakernel.config import Attention, expand_preset
from tests.unit.attention.shards import assert_same_with_gradients, check_shards_and_decoding

BATCH, HEADS, KEY_HEADS, WIDTH, TOKENS, BLOCK, RANK = 2, 4, 2, 4, 32, 4, 2
POSITIONS = torch.stack([torch.arange(TOKENS), torch.cat([torch.arange(n) for n in (3, 15, 1, 13)])])
CONFIGS = {
    "gated": {"near": {"join": "gated", "gate": "head"}},
    "shared, two blocks": {"near": {"join": "shared", "blocks": 2}},
    "kernel": {"near": {"kind": "kernel"}},
}


def layer(name, decay="gate"):
    sizes = {"compression": {"block_size": BLOCK, "rank": RANK}, "feature_map": {"name": "elu"}}
    config = {"preset": "flurka_decay", **sizes, **CONFIGS[name], "far_decay": decay}
    module = build(config, num_heads=HEADS, num_kv_heads=KEY_HEADS, head_dim=WIDTH, rotary=False).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return module


def inputs():
    """q, k, v and gate logits, large enough that landmarks decay within the sequence."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, 1))
    drawn = [torch.randn(BATCH, h, TOKENS, d, generator=draw, dtype=torch.float64) for h, d in shapes]
    return [*drawn[:3], 6 * drawn[3] - 6]


def reference(module, decay, q, k, v, further, positions):
    """Equations 4.1, 4.4 and the two merges, one sequence, head and token at a time; phi = elu + 1."""
    pool_keys, pool_values = module.pool_keys.softmax(-1), module.pool_values.softmax(-1)
    blocks, kernel_window = module.near.blocks, module.near.kind == "kernel"

    def phi(x):
        return torch.nn.functional.elu(x) + 1

    rows = []
    for row in range(BATCH):
        for head in range(HEADS):
            key_head = head // (HEADS // KEY_HEADS)
            keys, values = k[row, key_head], v[row, key_head]
            token_count = BLOCK / RANK * (module.far_mass[key_head].exp() if kernel_window else 1)
            for i in range(TOKENS):
                position = int(positions[row, i])
                first, block = i - position, position // BLOCK
                num, den = torch.zeros(WIDTH, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
                for ended in range(block):
                    last = first + ended * BLOCK + BLOCK - 1
                    if decay == "fixed":
                        decay_factor = 1 - 2.0 ** (-5 - key_head)
                    else:
                        logit = further[row, key_head, last, 0] + module.decay_bias[key_head]
                        decay_factor = torch.sigmoid(logit) ** (1 / 16)
                    num, den = decay_factor * num, decay_factor * den
                    start = last + 1 - BLOCK * blocks
                    if start < first:
                        continue
                    for s in range(RANK):
                        landmark = pool_keys[s] @ keys[start : start + BLOCK]
                        weight = token_count * (phi(q[row, head, i]) @ phi(landmark))
                        num = num + weight * (pool_values[s] @ values[start : start + BLOCK])
                        den = den + weight
                near = range(first + max(0, block - blocks + 1) * BLOCK, i + 1)
                if kernel_window:
                    weights = torch.stack([phi(q[row, head, i]) @ phi(keys[t]) for t in near])
                else:
                    weights = torch.stack([q[row, head, i] @ keys[t] / WIDTH**0.5 for t in near]).exp()
                near_num, near_den = weights @ values[list(near)], weights.sum()
                if den == 0:
                    out = near_num / near_den
                elif module.is_gated:
                    gate = torch.sigmoid(module.gate_bias[head])
                    out = gate * near_num / near_den + (1 - gate) * num / den
                else:
                    # exp(gamma) / phi(0).phi(0), and phi(0).phi(0) = d of elu.
                    scale = 1 if kernel_window else module.far_weight[head].exp() / WIDTH
                    out = (near_num + scale * num) / (near_den + scale * den)
                rows.append(out)
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize(("name", "decay"), [*((name, "gate") for name in CONFIGS), ("gated", "fixed")])
def test_layer_values_and_gradients_equal_the_formula(name, decay):
    tensors, module = [x.requires_grad_() for x in inputs()], layer(name, decay)
    q, k, v, further = tensors
    layer_inputs = AttentionInputs(POSITIONS, further=further if decay == "gate" else None)
    outputs = module(q, k, v, layer_inputs), reference(module, decay, *tensors, POSITIONS)
    assert_same_with_gradients(outputs, [*tensors[: 4 if decay == "gate" else 3], *module.parameters()])


def test_a_decay_that_leaves_nothing_does_not_disturb_later_landmarks(monkeypatch):
    *tensors, further = inputs()
    further[:, :, : TOKENS // 2] = -1e8
    outputs = {}
    for backend in ("chunked", "reference"):
        monkeypatch.setenv("MEGAKERNEL_BACKEND", backend)
        module = layer("gated").to(torch.float32 if backend == "chunked" else torch.float64)
        q, k, v, logits = (x.to(next(module.parameters()).dtype) for x in (*tensors, further))
        outputs[backend] = module(q, k, v, AttentionInputs(further=logits))
    # float32 sums of few landmarks
    torch.testing.assert_close(outputs["chunked"].double(), outputs["reference"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("positions", [None, POSITIONS], ids=["row", "packed"])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.usefixtures("small_chunks")
def test_shards_and_decoding_equal_the_whole_sequence(name, positions, backend, monkeypatch):
    tensors, module, rotary = [x.requires_grad_() for x in inputs()], layer(name), Rotary(WIDTH)
    q, k, v, further = tensors
    whole = module(q, k, v, AttentionInputs(positions, rotary=rotary, further=further))
    monkeypatch.setenv("MEGAKERNEL_BACKEND", backend)
    check_shards_and_decoding(module, whole, tensors, positions, rotary, size=4, prompt=(10, 19))


@pytest.mark.parametrize("preset", ["linear", "linformer_causal", "local", "mamba2"])
def test_far_decay_needs_landmarks_with_a_kernel(preset):
    with pytest.raises(ValueError, match=r"far_decay=gate decays landmarks.*preset: flurka"):
        Attention.model_validate(expand_preset({"preset": preset, "far_decay": "gate"}))
