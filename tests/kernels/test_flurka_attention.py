"""The kernels of causal FLuRKA, fused and composed, against its float64 reference."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megakernel.attention import Rotary
from megakernel.ops.feature_maps import FEATURE_MAPS, start_state
from megakernel.ops.flurka_attention import flurka_attention, triton
from megakernel.ops.flurka_attention.composed import ComposedKeyTensors, ComposedQueryTensors
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.flurka_attention.tensors import FlurkaKeyTensors, FlurkaQueryTensors, FlurkaStatic
from megakernel.ops.kernel_attention.tiles import SEGMENT
from megakernel.ops.kernels.feature_maps import SUPPORTED, phi_of
from megakernel.ops.state import KernelState, empty_state
from megakernel.ops.window import Tail, empty_tail
from tests.kernels.comparing import (
    TOLERANCE,
    assert_agrees,
    every_dtype,
)
from tests.tiers import tiered

VARIANTS = {"gated": ("softmax", True), "shared": ("softmax", False), "kernel": ("kernel", False)}
"""Name -> the near part, and whether it has a gate."""

COMPOSED = ["composed gated", "composed shared"]
FORMS = [*(f"triton {variant}" for variant in VARIANTS), *COMPOSED]
"""Backend and variant."""

every_form = pytest.mark.parametrize("form", FORMS)
every_backend = pytest.mark.parametrize("backend", ["triton", "composed"])

BLOCK, RANK = 16, 4


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of two blocks, so that short sequences have several."""
    monkeypatch.setattr(triton, "segment_blocks", lambda *_: 2)


def tokens(
    draw: torch.Generator,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    variant: str = "gated",
    feature_map: str = "hedgehog",
    length: int = 70,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    width: int = 12,
    values: int = 10,
    block: int = BLOCK,
    rank: int = RANK,
    per_head: bool = False,
    scale: float = 1.0,
    decays: bool = False,
) -> dict[str, Tensor]:
    """All differentiable arguments of the op for a layer of this variant.

    decays: whether the far state decays at block ends, little in the first head, nearly completely in the last.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    gated = VARIANTS[variant][1]
    leaves = {
        "q": scale * normal(batch, heads, length, width),
        "k": scale * normal(batch, kv_heads, length, width),
        "v": scale * normal(batch, kv_heads, length, values),
    }
    leaves = {name: x.to(dtype) for name, x in leaves.items()}
    for name in ("pool_keys", "pool_values"):
        leaves[name] = normal(*([kv_heads] if per_head else []), rank, block).softmax(-1)
    if FEATURE_MAPS[feature_map].projected:
        leaves["projection"] = 0.5 * normal(kv_heads, width if feature_map == "hedgehog" else 9, width)
    if gated:
        leaves["gate"] = normal(batch, heads, length)
        leaves["gate_weight"] = 0.3 * normal(heads, width)
    else:
        leaves["far_mass"] = 0.3 * normal(kv_heads)
    if variant == "shared":
        leaves["far_weight"] = 0.3 * normal(heads)
    if decays:
        strengths = torch.linspace(0.5, 30.0, kv_heads)[None, :, None]
        leaves["log_decay"] = -strengths * torch.rand(batch, kv_heads, length, generator=draw)
    return {name: x.to(device) for name, x in leaves.items()}


def with_state(
    leaves: dict[str, Tensor], draw: torch.Generator, feature_map: str, blocks: int
) -> dict[str, Tensor]:
    """`leaves`, a state with positive sums, and a tail."""
    k, v = leaves["k"], leaves["v"]
    start = start_state(feature_map, k, leaves.get("projection"), v.shape[-1]).sums
    count = blocks * leaves["pool_keys"].shape[-1]

    def normal(like: Tensor) -> Tensor:
        shape = (*like.shape[:2], count, like.shape[3])
        return torch.randn(shape, generator=draw).to(like.device, like.dtype)

    sums = 0.2 + torch.rand(start.shape, generator=draw).to(k.device)
    return {**leaves, "sums": sums, "tail_keys": normal(k), "tail_values": normal(v)}


def run(
    backend: str, leaves: dict[str, Tensor], *, variant: str, feature_map: str, **options
) -> dict[str, Tensor]:
    """The output, and the far state as one tensor."""
    leaves = dict(leaves)
    q, k, v = (leaves.pop(name) for name in "qkv")
    sums, far = leaves.pop("sums", None), None
    if sums is not None:
        far = KernelState(
            sums, sums.new_full(sums.shape[:2], 0.3 if FEATURE_MAPS[feature_map].unbounded else 0.0)
        )
    if "tail_keys" in leaves:
        tail = Tail(leaves.pop("tail_keys"), leaves.pop("tail_values"))
        options["initial_state"] = FlurkaState(far, tail)
    near = VARIANTS[variant][0]
    options = {"near": near, "rotary": Rotary(q.shape[-1]), **options}
    out, state = flurka_attention(q, k, v, feature_map=feature_map, backend=backend, **leaves, **options)
    far = state.far.sums * state.far.log_scale.exp()[..., None, None]
    # Without a complete block, the state is 0.
    return {"out": out, "state": far} if far.any() else {"out": out}


def documents(device: torch.device, *starts: int, first: int = 0) -> Tensor:
    """Positions of a sequence with documents between `starts`; the first document begins at position `first`."""
    parts = [torch.arange(b - a) + (first if a == 0 else 0) for a, b in pairwise(starts)]
    return torch.cat(parts)[None].to(device)


@every_form
def test_outputs_lie_in_memory_as_the_output_projection_reads_them(form, draw, device):
    backend, variant = form.split()
    leaves = tokens(draw, device, variant=variant, batch=2, heads=4)
    out = run(backend, leaves, variant=variant, feature_map="hedgehog")["out"]
    assert out.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.covering(1, 2)
@every_form
@every_dtype
@pytest.mark.parametrize("feature_map", tiered(["hedgehog", "favor"], ["hedgehog"]))
@pytest.mark.usefixtures("short_segments")
def test_documents_states_and_shared_keys_agree(form, feature_map, dtype, draw, device):
    backend, variant = form.split()
    leaves = tokens(
        draw, device, dtype, variant=variant, feature_map=feature_map, length=74, heads=4, kv_heads=2
    )
    blocks = 2 if feature_map == "favor" else 1
    leaves = with_state(leaves, draw, feature_map, blocks)
    # The first document continues the state; others begin inside chunks, at chunk edges and at segment edges.
    positions = documents(device, 0, 20, 23, 64, 74, first=37)
    options = {"variant": variant, "feature_map": feature_map, "blocks": blocks, "positions": positions}
    assert_agrees(partial(run, **options), leaves, draw, TOLERANCE[dtype], backend)


SUMMED = [("triton shared", 17), ("triton kernel", 64), ("composed shared", 17)]


@pytest.mark.parametrize(("form", "length"), tiered(SUMMED, SUMMED[:1]))
@pytest.mark.usefixtures("short_segments")
def test_gradients_summed_over_all_tokens_are_as_exact_as_bfloat16(form, length, draw, device):
    backend, variant = form.split()
    leaves = tokens(
        draw, device, torch.bfloat16, variant=variant, feature_map="favor", length=length, heads=4, kv_heads=4
    )
    run_it = partial(run_wide, variant=variant, feature_map="favor")
    assert_agrees(run_it, leaves, draw, TOLERANCE[torch.bfloat16], backend)


@pytest.mark.covering(1, 1)
@every_backend
@every_dtype
@pytest.mark.parametrize("shape", [(4, 1), (1, 4, 40)], ids=["heads", "logits"])
@pytest.mark.usefixtures("short_segments")
def test_a_gate_of_heads_or_given_logits_agrees(shape, dtype, backend, draw, device):
    leaves = tokens(draw, device, dtype, heads=4, kv_heads=2, length=40)
    del leaves["gate_weight"]
    leaves["gate"] = torch.randn(shape, generator=draw).to(device)
    run_it = partial(run, variant="gated", feature_map="hedgehog")
    assert_agrees(run_it, leaves, draw, TOLERANCE[dtype], backend)


MAPS = [("triton", name) for name in SUPPORTED] + [("composed", name) for name in SUPPORTED]


@pytest.mark.parametrize(
    ("backend", "feature_map"),
    tiered(MAPS, [("triton", "hedgehog"), ("triton", "favor"), ("composed", "favor")]),
)
@pytest.mark.usefixtures("short_segments")
def test_every_map_agrees_on_sequences_of_several_tiles(backend, feature_map, draw, device):
    leaves = tokens(draw, device, feature_map=feature_map, per_head=True)
    # Keep weights positive, because denominators near 0 lose all digits. Cosines of small angles are positive.
    if feature_map == "identity":
        leaves |= {name: leaves[name].abs() for name in ("q", "k")}
    elif feature_map == "rks":
        leaves["projection"] /= 4
    options = {
        "variant": "gated",
        "feature_map": feature_map,
        "blocks": FEATURE_MAPS[feature_map].halves,
    }
    assert_agrees(partial(run, **options), leaves, draw, TOLERANCE[torch.float32], backend)


@pytest.mark.second
@pytest.mark.covering(1)
@pytest.mark.parametrize("form", ["triton shared", "triton kernel", "composed shared"])
@pytest.mark.parametrize("feature_map", ["hedgehog", "prf"])
@pytest.mark.usefixtures("short_segments")
def test_one_normalizer_agrees_on_sequences_of_several_tiles(form, feature_map, draw, device):
    backend, variant = form.split()
    leaves = tokens(draw, device, variant=variant, feature_map=feature_map)
    run_it = partial(run, variant=variant, feature_map=feature_map)
    assert_agrees(run_it, leaves, draw, TOLERANCE[torch.float32], backend)


@pytest.mark.covering(1)
@every_backend
@pytest.mark.parametrize("length", [1, 17, 64])
@every_dtype
def test_any_length_agrees(length, dtype, backend, draw, device):
    assert_length_agrees(length, dtype, backend, draw, device)


@pytest.mark.second
@every_backend
def test_segments_of_their_usual_length_agree(backend, draw, device):
    """The end of the sequence is in the third segment."""
    assert triton.segment_blocks(phi_of("elu", 16, None), 16, 8) * 16 == SEGMENT
    assert_length_agrees(2 * SEGMENT + 70, torch.bfloat16, backend, draw, device, block=16)


def assert_length_agrees(length, dtype, backend, draw, device, block=64):
    sizes = {"length": length, "heads": 1, "width": 16, "values": 16, "block": block, "rank": 8}
    leaves = tokens(draw, device, dtype, feature_map="elu", **sizes)
    run_it = partial(run_wide, variant="gated", feature_map="elu")
    assert_agrees(run_it, leaves, draw, TOLERANCE[dtype], backend)


def run_wide(backend: str, leaves: dict[str, Tensor], **options) -> dict[str, Tensor]:
    """`run` with the chunked op instead of the token-by-token reference, which would take minutes for long sequences.

    In float64 the two agree: tests/unit/ops/test_flurka_attention.py compares them.
    """
    return run("chunked" if backend == "reference" else backend, leaves, **options)


COMMON = [("triton", "elu"), ("triton", "hedgehog"), ("composed", "hedgehog")]


@pytest.mark.parametrize(("backend", "feature_map"), tiered(COMMON, COMMON[:1]))
def test_common_head_widths_agree(backend, feature_map, draw, device):
    leaves = tokens(
        draw,
        device,
        torch.bfloat16,
        feature_map=feature_map,
        length=130,
        heads=1,
        width=128,
        values=128,
        block=64,
        rank=8,
        scale=0.3,
    )
    options = {"variant": "gated", "feature_map": feature_map}
    assert_agrees(partial(run_wide, **options), leaves, draw, TOLERANCE[torch.bfloat16], backend)


BLOCKS = [(*sizes, "triton kernel") for sizes in ((16, 16), (1, 1), (5, 3), (48, 8))]
BLOCKS += [(1, 1, "composed shared"), (5, 3, "composed gated")]


@pytest.mark.parametrize(("block", "rank", "form"), BLOCKS)
@pytest.mark.usefixtures("short_segments")
def test_any_block_agrees(block, rank, form, draw, device):
    backend, variant = form.split()
    leaves = tokens(
        draw, device, variant=variant, feature_map="elu", block=block, rank=rank, length=2 * block + 7
    )
    run_it = partial(run, variant=variant, feature_map="elu")
    assert_agrees(run_it, leaves, draw, TOLERANCE[torch.float32], backend)


@pytest.mark.covering(1)
@every_form
@pytest.mark.parametrize("positions", [32, 37])
@pytest.mark.usefixtures("short_segments")
def test_sequences_that_continue_a_document_agree(form, positions, draw, device):
    backend, variant = form.split()
    leaves = with_state(tokens(draw, device, variant=variant, length=40), draw, "hedgehog", 2)
    options = {"variant": variant, "feature_map": "hedgehog", "blocks": 2, "positions": positions}
    assert_agrees(partial(run, **options), leaves, draw, TOLERANCE[torch.float32], backend)


# Every pair of values; greedily chosen, they would be nine cases instead of six.
DECAYING = [
    ("triton gated", "elu", True, torch.float32),
    ("triton shared", "elu", False, torch.bfloat16),
    ("triton shared", "hedgehog", True, torch.float32),
    ("triton gated", "hedgehog", False, torch.bfloat16),
    ("triton gated", "favor", True, torch.bfloat16),
    ("triton shared", "favor", False, torch.float32),
    ("composed gated", "hedgehog", True, torch.bfloat16),
    ("composed shared", "favor", False, torch.float32),
]


@pytest.mark.second
@pytest.mark.parametrize(("form", "feature_map", "packed", "dtype"), DECAYING, ids=str)
@pytest.mark.usefixtures("short_segments")
def test_landmarks_that_decay_agree(form, feature_map, packed, dtype, draw, device):
    """Over several segments, packed or one continued document, with gradients of the returned state.

    Documents have several blocks: with few decays that leave anything, rounding errors would dominate their gradient.
    """
    backend, variant = form.split()
    sizes = {"length": 112, "heads": 4, "kv_heads": 2}
    leaves = tokens(draw, device, dtype, variant=variant, feature_map=feature_map, decays=True, **sizes)
    options = {"variant": variant, "feature_map": feature_map, "blocks": 2 if feature_map == "favor" else 1}
    leaves = with_state(leaves, draw, feature_map, options["blocks"])
    # The last document ends a block in a segment that a state of the first one enters.
    positions = documents(device, 0, 38, 44, 112, first=37) if packed else 37
    assert_agrees(partial(run, **options, positions=positions), leaves, draw, TOLERANCE[dtype], backend)


@pytest.mark.parametrize("form", ["triton shared", "triton kernel", "composed shared"])
@pytest.mark.usefixtures("short_segments")
def test_the_empty_state_that_enters_the_first_shard_changes_nothing(form, draw, device):
    backend, variant = form.split()
    leaves = tokens(draw, device, variant=variant)
    options = {"variant": variant, "feature_map": "hedgehog"}
    alone = run(backend, leaves, **options)["out"]
    k, v = leaves["k"], leaves["v"]
    far = empty_state(start_state("hedgehog", k, leaves["projection"], v.shape[-1]))
    entering = FlurkaState(far, empty_tail(k, v, BLOCK))
    assert torch.equal(run(backend, leaves, initial_state=entering, **options)["out"], alone)


@pytest.mark.usefixtures("short_segments")
def test_a_state_from_another_rank_enters(draw, device):
    leaves = with_state(tokens(draw, device, length=40), draw, "hedgehog", 1)

    def exchanged(backend: str, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        sums = kept["sums"]

        class Pending:
            def wait(self) -> KernelState:
                return KernelState(sums, sums.new_zeros(sums.shape[:2]))

        options = {"variant": "gated", "feature_map": "hedgehog", "positions": 23}
        kept = {name: x for name, x in kept.items() if name != "sums"}
        return run(backend, kept, **options, exchange=lambda own, carries: Pending())

    assert_agrees(exchanged, leaves, draw, TOLERANCE[torch.float32])


@every_backend
@pytest.mark.usefixtures("short_segments")
def test_outputs_are_the_same_without_return_state(backend, draw, device):
    leaves = tokens(draw, device, length=40)
    options = {"feature_map": "hedgehog", "rotary": Rotary(12), "backend": backend}
    out, _ = flurka_attention(**leaves, **options)
    again, state = flurka_attention(**leaves, **options, return_state=False)
    assert torch.equal(out, again)
    assert state is None


def test_the_operators_pass_opcheck(draw, device):
    leaves = {name: x.requires_grad_() for name, x in tokens(draw, device, length=20).items()}
    far_mass = torch.zeros(1, device=device, requires_grad=True)
    queries = FlurkaQueryTensors(leaves["q"], leaves["gate"], leaves["gate_weight"])
    named = {name: leaves[name] for name in ("k", "v", "pool_keys", "pool_values", "projection")}
    keys, no_state = FlurkaKeyTensors(**named, far_mass=far_mass), (None, None, None)
    static = FlurkaStatic("hedgehog", 1, "softmax", blocks=1, start=0, before=0, oldest=0, trains=True)
    arguments = (*queries, *keys, *no_state, *static)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.megakernel.flurka_attention.default, arguments, test_utils=tests)
    near_q, near_k = (x.detach().clone().requires_grad_() for x in (leaves["q"], leaves["k"]))
    last = torch.arange(20, device=device, dtype=torch.int32)[None]
    composed_keys = ComposedKeyTensors(near_k, last // BLOCK * BLOCK, last, *keys)
    queries = ComposedQueryTensors(leaves["q"], near_q, leaves["gate"])
    arguments = (*queries, *composed_keys, *no_state, *static)
    torch.library.opcheck(torch.ops.megakernel.composed_flurka_attention.default, arguments, test_utils=tests)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"dtype": torch.float64}, {}, "q is torch.float64; expected bfloat16, float16 or float32"),
        ({"width": 40}, {}, "q has width 40 in torch.float32; expected at most 16"),
        (
            {"width": 136, "dtype": torch.bfloat16},
            {},
            "q has width 136 in torch.bfloat16; expected at most 128",
        ),
        ({"block": 160}, {}, "blocks have 160 tokens; expected at most 128"),
        ({}, {"far_rope": "centroid"}, "far_rope='centroid' rotates landmarks; expected far_rope='none'"),
        ({}, {"rotary": lambda x, at: x}, "rotary is not an `attention.Rotary`"),
    ],
)
def test_unsupported_inputs_are_refused_with_a_reason(changes, options, message, draw, device):
    leaves = tokens(draw, device, feature_map="elu", length=8, **changes)
    with pytest.raises(ValueError, match=message):
        run("triton", leaves, variant="gated", feature_map="elu", **options)


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("kernel", {}, "backend='composed': near is kernel; expected near='softmax'"),
        ("gated", {"exchange": lambda own, carries: None}, "exchange is given; expected whole sequences"),
        (
            "gated",
            {"far_rope": "centroid"},
            "far_rope='centroid' rotates landmarks; expected far_rope='none'",
        ),
    ],
)
def test_the_composed_form_refuses_what_it_does_not_take(variant, options, message, draw, device):
    leaves = tokens(draw, device, variant=variant, feature_map="elu", length=8)
    with pytest.raises(ValueError, match=message):
        run("composed", leaves, variant=variant, feature_map="elu", **options)


@every_form
@pytest.mark.usefixtures("short_segments")
def test_two_runs_are_bit_identical(form, draw, device):
    backend, variant = form.split()
    leaves = tokens(draw, device, torch.bfloat16, variant=variant, length=40)

    def numbers() -> list[Tensor]:
        kept = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        out = run(backend, kept, variant=variant, feature_map="hedgehog")["out"]
        return [out, *torch.autograd.grad(out.float().square().sum(), list(kept.values()))]

    assert all(torch.equal(one, other) for one, other in zip(numbers(), numbers(), strict=True))
