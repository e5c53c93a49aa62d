"""Decoding FLuRKA token by token, in one launch each, gives the results of the whole sequence at once."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel import attention
from megakernel.attention import Rotary
from megakernel.config.rope import RopeScaling
from megakernel.ops.feature_maps import start_state
from megakernel.ops.flurka_attention import chunked, flurka_attention
from megakernel.ops.flurka_attention.options import FlurkaInputs, FlurkaOptions, FlurkaState, Weights
from megakernel.ops.flurka_attention.triton import SIGNED
from megakernel.ops.kernels.feature_maps import SUPPORTED
from megakernel.ops.kernels.launch import Launch, record_launches
from megakernel.ops.state import KernelState
from megakernel.ops.window import Tail, empty_tail
from tests.kernels.comparing import TOLERANCE, rms_ratio
from tests.kernels.test_decode import exactly
from tests.kernels.test_flurka_attention import VARIANTS, tokens
from tests.tiers import tiered

PER_TOKEN = ("q", "k", "v", "gate", "log_decay")


def forbid_all_but_steps(patch: pytest.MonkeyPatch) -> None:
    """Fail if other kernels or the chunked op run."""
    from megakernel.ops.flurka_attention import triton

    def refused(*_, **__):
        raise AssertionError("not the decoding step")

    patch.setattr(triton, "flurka_operator", refused)
    patch.setattr(chunked, "_over_groups", refused)


def options_of(leaves: dict[str, Tensor], variant: str, feature_map: str, blocks: int) -> dict:
    """The arguments of the op that are not tensors."""
    rotary = Rotary(leaves["q"].shape[-1])
    return {"near": VARIANTS[variant][0], "feature_map": feature_map, "blocks": blocks, "rotary": rotary}


def call(leaves: dict[str, Tensor], first: int, stop: int, positions, state, backend: str, **options):
    """Output and state of the tokens `first` .. `stop` - 1."""
    here = {name: x[:, :, first:stop] if name in PER_TOKEN else x for name, x in leaves.items()}
    if isinstance(positions, Tensor):
        positions = positions[:, first:stop]
    return flurka_attention(**here, **options, positions=positions, initial_state=state, backend=backend)


def total(state: FlurkaState) -> Tensor:
    return state.far.sums.double() * state.far.log_scale.double().exp()[..., None, None]


@torch.no_grad()
def assert_steps_agree(leaves: dict[str, Tensor], positions: Tensor, prompt: int, **options) -> None:
    """A prompt at once, then steps, give the float64 reference's outputs and last state."""
    length = positions.shape[1]
    whole = {name: exactly(x) for name, x in leaves.items()}
    expected, last = call(whole, 0, length, positions, None, "reference", **options)
    out, state = call(leaves, 0, prompt, positions, None, "chunked", **options)
    outputs = [out]
    with pytest.MonkeyPatch.context() as patch:
        forbid_all_but_steps(patch)
        for at in range(prompt, length):
            out, state = call(leaves, at, at + 1, positions, state, "triton", **options)
            outputs.append(out)
    assert rms_ratio(torch.cat(outputs, 2), expected) <= TOLERANCE[out.dtype]
    assert rms_ratio(total(state), total(last)) <= TOLERANCE[torch.float32]
    assert torch.equal(state.tail.keys.double(), last.tail.keys)
    assert torch.equal(state.tail.values.double(), last.tail.values)


def two_rows(length: int, restart: int, device: torch.device) -> Tensor:
    """Positions (2, length): one document; and two, the second of which begins at `restart`."""
    places = torch.arange(length, device=device)
    return torch.stack([places, torch.where(places < restart, places, places - restart)])


DECODED = {"length": 13, "batch": 2, "heads": 6, "kv_heads": 2, "block": 3, "rank": 2}
"""Sizes of a prompt of two blocks, followed by steps that see landmarks and end two more."""


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("feature_map", tiered(SUPPORTED, ["hedgehog", "favor"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decoding_token_by_token_equals_the_whole_sequence(feature_map, variant, blocks, dtype, draw, device):
    """Over several blocks, with grouped queries, odd sizes, and sequences at different positions."""
    if feature_map in SIGNED and variant == "shared":
        variant = "gated"  # negative weights cannot share a softmax's normalizer
    leaves = tokens(
        draw, device, dtype, variant=variant, feature_map=feature_map, per_head=blocks == 2, **DECODED
    )
    # Keep weights positive, because denominators near 0 lose all digits. Cosines of small angles are positive.
    if feature_map == "identity":
        leaves |= {name: leaves[name].abs() for name in ("q", "k")}
    elif feature_map == "rks":
        leaves["projection"] /= 4
    options = options_of(leaves, variant, feature_map, blocks)
    assert_steps_agree(leaves, two_rows(13, 8, device), 6, **options)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "feature_map"), [("gated", "hedgehog"), ("shared", "favor")])
def test_a_far_state_that_decays_agrees(variant, feature_map, dtype, draw, device):
    leaves = tokens(draw, device, dtype, variant=variant, feature_map=feature_map, decays=True, **DECODED)
    options = options_of(leaves, variant, feature_map, 2)
    assert_steps_agree(leaves, two_rows(13, 8, device), 6, **options)


@pytest.mark.parametrize(
    ("block", "rank", "blocks"), tiered([(1, 1, 1), (1, 1, 2), (8, 8, 1), (40, 5, 2)], [(1, 1, 1)])
)
def test_any_block_agrees(block, rank, blocks, draw, device):
    """Windows of one token, and of several tiles of keys; with small blocks, all tokens but the first are steps."""
    length = block * blocks + block + 3
    leaves = tokens(
        draw, device, variant="kernel", feature_map="elu", length=length, batch=2, block=block, rank=rank
    )
    options = options_of(leaves, "kernel", "elu", blocks)
    prompt = max(1, length - 6) if block > 8 else 1
    assert_steps_agree(leaves, two_rows(length, 2, device), prompt, **options)


def test_wide_values_are_split_into_blocks(draw, device, monkeypatch):
    from megakernel.ops.flurka_attention import decode

    monkeypatch.setattr(decode, "TILE", 16 * 16)
    leaves = tokens(draw, device, length=10, batch=2, values=40, block=3, rank=2)
    assert_steps_agree(leaves, two_rows(10, 4, device), 5, **options_of(leaves, "gated", "hedgehog", 1))


def test_a_rotation_that_scales_vectors_agrees(draw, device):
    leaves = tokens(draw, device, variant="shared", feature_map="elu", length=9, batch=2, block=3, rank=2)
    scaling = RopeScaling(kind="yarn", factor=4.0, original_seq_len=64)
    options = options_of(leaves, "shared", "elu", 2) | {"rotary": Rotary(12, scaling=scaling)}
    assert options["rotary"].scale != 1
    assert_steps_agree(leaves, two_rows(9, 9, device), 5, **options)


@torch.no_grad()
def test_positions_far_into_a_document_are_as_exact_as_at_its_start(draw, device):
    """Positions beyond float32's integers, given as one number for all sequences."""
    leaves = tokens(draw, device, feature_map="elu", length=7, block=3, rank=2)
    options = options_of(leaves, "gated", "elu", 1)
    start = 3 * (2**24 // 3 + 1)
    _, state = call(leaves, 0, 5, start, None, "chunked", **options)
    out, after = call(leaves, 5, 6, start + 5, state, "triton", **options)
    exact = FlurkaState(*(exactly(part) for part in state))
    whole = {name: exactly(x) for name, x in leaves.items()}
    expected, last = call(whole, 5, 6, start + 5, exact, "reference", **options)
    assert rms_ratio(out, expected) <= TOLERANCE[torch.float32]
    assert rms_ratio(total(after), total(last)) <= TOLERANCE[torch.float32]


@torch.no_grad()
def test_the_initial_state_is_not_modified(draw, device):
    leaves = tokens(draw, device, feature_map="favor", length=6, block=3, rank=2)
    options = options_of(leaves, "gated", "favor", 1)
    _, state = call(leaves, 0, 5, 0, None, "chunked", **options)
    before = FlurkaState(*(type(part)(*(x.clone() for x in part)) for part in state))
    _, after = call(leaves, 5, 6, 5, state, "triton", **options)
    for part, old, new in zip(state, before, after):
        assert all(torch.equal(a, b) for a, b in zip(part, old))
        assert not any(torch.equal(a, b) for a, b in zip(part, new) if a.dim() == 4)


@torch.no_grad()
def test_a_new_document_sees_nothing_of_the_previous_one(draw, device):
    """Neither its state nor its tail, whatever they hold."""
    leaves = tokens(draw, device, length=6, batch=1, block=3, rank=2)
    options = options_of(leaves, "gated", "hedgehog", 1)
    _, empty = call(leaves, 0, 3, 0, None, "chunked", **options)
    lost = FlurkaState(*(type(part)(*(torch.full_like(x, torch.nan) for x in part)) for part in empty))
    states = [empty, lost]
    for at in range(3, 6):
        (out, first), (other, second) = (
            call(leaves, at, at + 1, torch.tensor([[at - 3] * 6], device=device), state, "triton", **options)
            for state in states
        )
        assert torch.equal(out, other)
        states = [first, second]
    assert torch.equal(first.far.sums, second.far.sums)


@torch.no_grad()
def test_a_layer_decodes_with_the_step_kernel(draw, device, monkeypatch):
    """After a prompt, with positions as in generation."""
    tree = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}}
    layer = attention.build(tree, num_heads=4, num_kv_heads=2, head_dim=8).to(device)
    q, k, v = (torch.randn(2, heads, 11, 8, generator=draw).to(device) for heads in (4, 2, 2))
    places, rotary = two_rows(11, 8, device), Rotary(8)
    expected = layer.double()(*map(exactly, (q, k, v)), attention.AttentionInputs(places, rotary=rotary))
    layer = layer.float()
    out, state = layer.extend(q[:, :, :5], k[:, :, :5], v[:, :, :5], positions=places[:, :5], rotary=rotary)
    outputs = [out]
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "triton")
    forbid_all_but_steps(monkeypatch)
    for at in range(5, 11):
        here, positions = slice(at, at + 1), places[:, at : at + 1]
        token = (x[:, :, here] for x in (q, k, v))
        out, state = layer.extend(*token, state, positions=positions, rotary=rotary)
        outputs.append(out)
    assert rms_ratio(torch.cat(outputs, 2), expected) <= TOLERANCE[torch.float32]


class Prepared:
    """A bfloat16 layer and a token; only the position changes."""

    def __init__(self):
        self.q, self.k = (torch.zeros(2, heads, 1, 16, dtype=torch.bfloat16) for heads in (4, 2))
        projection = torch.ones(2, 16, 16)
        tail = Tail(*(torch.zeros(2, 2, 8, 16, dtype=torch.bfloat16) for _ in range(2)))
        self.options = {
            "feature_map": "hedgehog",
            "projection": projection,
            "pool_keys": torch.ones(4, 8),
            "pool_values": torch.ones(4, 8),
            "gate": torch.zeros(2, 4, 1),
            "far_mass": torch.zeros(2),
            "rotary": Rotary(16),
            "initial_state": FlurkaState(start_state("hedgehog", self.k, projection, 16), tail),
            "backend": "triton",
        }
        self.positions = torch.zeros(2, 1, dtype=torch.int64)

    @torch.no_grad()
    def launches(self, place: int) -> list[Launch]:
        """The launches of a token at this position."""
        self.positions.fill_(place)
        return self.started()

    @torch.no_grad()
    def started(self) -> list[Launch]:
        with record_launches() as launches:
            flurka_attention(self.q, self.k, self.k, positions=self.positions, **self.options)
        return launches


def test_the_host_starts_the_same_launch_for_every_token():
    """For any position in its block, so that a captured CUDA graph can be replayed."""
    prepared = Prepared()
    first, *others = (
        [host_view(launch) for launch in prepared.launches(place)] for place in (0, 3, 7, 8, 1000)
    )
    assert len(first) == 1
    assert all(other == first for other in others)


def host_view(x: Any) -> Any:
    """What the host passes to a launch; shape, stride and dtype for tensors."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    return tuple(map(host_view, x)) if isinstance(x, tuple) else x


def test_a_step_is_one_launch_and_no_computation_by_torch():
    """No copy, no sum, no value that the host reads: torch only allocates tensors and takes views."""
    prepared = Prepared()
    assert len(prepared.launches(9)) == 1  # makes the table of angles
    torch.use_deterministic_algorithms(False)  # which would fill new tensors
    with torch.profiler.profile() as profile:
        prepared.started()
    without_numbers = ("as_strided", "empty", "expand", "new_empty", "reshape", "to", "view")
    called = {event.key for event in profile.key_averages() if "::" in event.key}
    computed = called - {f"aten::{name}" for name in without_numbers}
    assert computed == {"megakernel::flurka_attention_step"}


class Computed(TorchDispatchMode):
    """Counts torch operations that compute, that is, are not views."""

    def __init__(self):
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func._schema.name not in (
            "aten::_unsafe_view",
            "prim::device",
            "aten::promote_types",
        ):
            self.counted[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_few_operations_surround_the_launch_of_a_layer():
    layer = attention.build("flurka", num_heads=4, num_kv_heads=2, head_dim=16).bfloat16()
    rotary, positions = Rotary(16), torch.arange(70).expand(2, -1)
    q, k = (torch.zeros(2, heads, 71, 16, dtype=torch.bfloat16) for heads in (4, 2))
    prompt, token = slice(0, 70), slice(70, 71)
    _, state = layer.extend(
        q[:, :, prompt], k[:, :, prompt], k[:, :, prompt], positions=positions, rotary=rotary
    )
    q, k, positions = q[:, :, token], k[:, :, token], positions[:, -1:] + 1

    for _ in range(2):  # the first one makes the table of angles
        with record_launches() as launches, Computed() as operations:
            layer.extend(q, k, k, state, positions=positions, rotary=rotary)
    assert len(launches) == 1
    assert operations.counted.pop("megakernel::flurka_attention_step") == 1
    # Pools from bfloat16 logits, the heads' gates, and the next position.
    expected = {"_to_copy": 2, "_softmax": 2, "clone": 1, "add": 1}
    assert operations.counted == {f"aten::{name}": count for name, count in expected.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"tail": None}, "the token continues no state"),
        ({"exchange": lambda own, carries: None}, "the token continues no state"),
        ({"block": 136}, "136 tokens and 4 landmarks; expected at most 128 and 32"),
        ({"rank": 40}, "8 tokens and 40 landmarks"),
        ({"width": 136}, "q has width 136"),
        ({"dtype": torch.float16}, "q is torch.float16, whose range is too small"),
        ({"length": 2}, "q has 2 tokens; expected 1"),
        ({"sums": torch.float64}, "the state is torch.float64"),
        ({"learns": True}, "an input requires a gradient"),
    ],
)
def test_unsupported_inputs_are_refused_with_a_reason(changes, message, draw):
    from megakernel.ops.flurka_attention import decode

    given = {
        "block": 8,
        "rank": 4,
        "length": 1,
        "width": 16,
        "dtype": torch.float32,
        "sums": torch.float32,
        "learns": False,
        **changes,
    }
    sizes = {name: given[name] for name in ("block", "rank", "length", "width", "dtype")}
    leaves = tokens(draw, torch.device("cpu"), values=16, **sizes)
    q, k, v, projection, *pools = (
        leaves[x] for x in ("q", "k", "v", "projection", "pool_keys", "pool_values")
    )
    far = start_state("hedgehog", k, projection.requires_grad_(given["learns"]), 16)
    inputs = FlurkaInputs(
        FlurkaOptions("hedgehog", given["block"], 1, "softmax", None, "none"),
        Weights(projection, *pools, None, None, None, None, None),
        gate=leaves["gate"],
        positions=3,
        far=KernelState(far.sums.to(given["sums"]), far.log_scale),
        tail=given.get("tail", empty_tail(k, v, given["block"])),
        exchange=given.get("exchange"),
    )
    reason = decode.unsupported(q, k, v, inputs)
    assert reason is None if message is None else re.search(message, reason)


def test_the_operator_passes_opcheck(draw, device):
    from megakernel.ops.flurka_attention import decode

    leaves = tokens(draw, device, length=1, batch=2, heads=4, kv_heads=2, width=8, values=8, block=4, rank=2)
    far = start_state("hedgehog", leaves["k"], leaves["projection"], 8)
    tail = torch.zeros(2, 2, 4, 8, device=device)
    arguments = (
        *(leaves[name] for name in ("q", "k", "v", "gate")),
        *(torch.full((2, 1), 3, device=device), *far, tail, tail.clone(), leaves["projection"]),
        *(leaves["pool_keys"], leaves["pool_values"], None, None, leaves["gate_weight"], None, None),
        *("hedgehog", 1, "softmax", 1),
    )
    torch.library.opcheck(decode._step, arguments)
