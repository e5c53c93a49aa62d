"""The ops whose properties `test_contract.py`, here and in `tests/kernels/`, tests: one `OpCase` per op and form.

A case declares its inputs, how to call the op and what the op promises; no test decides by name. To add an op, add its
cases. What is particular to an op (its own formulas, fusions, launches, messages) stays in the op's own test file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megakernel.attention import Rotary
from megakernel.config.algebra import Informer
from megakernel.config.rope import RopeScaling
from megakernel.ops.documents import Positions
from megakernel.ops.feature_maps import FEATURE_MAPS
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.gated_delta_rule import gated_delta_rule
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.selected_attention import (
    choice,
    chunked,
    grouped,
    masked,
    readers,
    selected_attention,
)
from megakernel.ops.short_convolution import short_convolution
from megakernel.ops.simple_gla import simple_gla
from megakernel.ops.softmax_attention import softmax_attention
from megakernel.ops.state import KernelState
from megakernel.ops.weighted_attention import weighted_attention
from megakernel.ops.window_attention import window_attention
from megakernel.papers.skyformer import nystrom_attention, skyformer_attention
from megakernel.papers.sparse import bigbird_attention, informer_attention, reformer_attention

Leaves = dict[str, Tensor]
"""Name -> input; a test may ask for the gradient of each."""

BATCH, HEADS, KV_HEADS, WIDTH, VALUES = 2, 4, 2, 4, 3
BLOCK, RANK = 4, 2
"""Tokens and landmarks of a block of FLuRKA."""


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a state, each of which is determined: sums are multiplied by their scales."""
    if isinstance(state, KernelState):
        return [state.sums * state.log_scale.exp()[..., None, None]]
    if isinstance(state, Tensor):
        return [state]
    return [] if state is None else [x for part in state for x in tensors_of(part)]


ATTENTION_REFUSALS = (
    ({"q": lambda q: q[:, :, :, 0]}, "q has shape"),
    ({"q": lambda q: q.long()}, "q has dtype torch.int64"),
    ({"k": lambda k: k[..., 1:]}, "k has shape"),
    ({"v": lambda v: v[:1]}, "v has shape"),
)
POSITION_REFUSALS = (
    ({"positions": [0, 1]}, "positions="),
    ({"positions": torch.zeros(BATCH, 5, dtype=torch.int64)}, "positions is"),
    ({"positions": torch.zeros(BATCH, 23)}, "positions is"),
)
CAUSAL_REFUSALS = ATTENTION_REFUSALS + POSITION_REFUSALS


@dataclass(frozen=True)
class OpCase:
    """An op in one of its forms."""

    call: Callable[..., tuple[Tensor, Any]]
    """(leaves, positions, state, backend) -> the output (..., N, D), and the outgoing state or None."""

    leaves: Callable[[int, torch.Generator], Leaves]
    """(N, generator) -> float64 inputs of a sequence of N tokens."""

    per_token: Mapping[str, int]
    """Name -> the dimension of tokens, of the leaves that have one; negative."""

    backends: tuple[str, ...] = ("chunked",)
    """Its backends besides the reference. Several forms of one backend are several cases."""

    causal: bool = True
    continues: bool = True
    """Whether it takes a state; if it is causal, too, a sequence may then be split anywhere."""

    packs: bool = True
    """Whether it takes positions of packed documents."""

    state: Callable[[Any], list[Tensor]] = tensors_of
    """The tensors of a state that do not depend on where a sequence was split."""

    constants: tuple[tuple[Any, str, Any], ...] = ()
    """(module, name, value) besides those of the fixture `small_chunks`."""

    refusals: tuple[tuple[dict[str, Any], str], ...] = CAUSAL_REFUSALS
    """Changed leaves (name -> function) or positions, and the beginning of the message."""


def normal(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def qkv(
    length: int, draw: torch.Generator, *, kv_heads: int = KV_HEADS, keys: int = 0, values: int = VALUES
) -> Leaves:
    """keys: keys per token of a mixture, 0: none."""
    mixed = (keys,) if keys else ()
    return {
        "q": normal(draw, BATCH, HEADS, length, WIDTH),
        "k": normal(draw, BATCH, kv_heads, *mixed, length, WIDTH),
        "v": normal(draw, BATCH, kv_heads, length, values),
    }


QKV = {"q": -2, "k": -2, "v": -2}

# Kernel attention


def kernel_leaves(
    length: int, draw: torch.Generator, *, feature_map: str, keys: int = 0, kv_heads: int = KV_HEADS
) -> Leaves:
    leaves = qkv(length, draw, keys=keys, kv_heads=kv_heads)
    if feature_map == "identity":  # with weights of both signs, denominators near 0 lose all digits
        leaves |= {name: leaves[name].abs() for name in "qk"}
    if FEATURE_MAPS[feature_map].projected:
        leaves["projection"] = normal(draw, kv_heads, WIDTH if feature_map == "hedgehog" else 6, WIDTH)
    if keys:
        leaves["priors"] = normal(draw, kv_heads, keys).square()
    else:
        leaves["key_weights"] = normal(draw, BATCH, 1, length).square()
    return leaves


def call_kernel(leaves: Leaves, positions: Positions, state: KernelState | None, backend: str, **options):
    options |= {"positions": positions, "initial_state": state, "backend": backend}
    return kernel_attention(**leaves, **options, return_state=True)


def kernel_case(feature_map: str, *, keys: int = 0, kv_heads: int = KV_HEADS, **options) -> OpCase:
    return OpCase(
        partial(call_kernel, feature_map=feature_map, **options),
        partial(kernel_leaves, feature_map=feature_map, keys=keys, kv_heads=kv_heads),
        QKV if keys else QKV | {"key_weights": -1},
        ("chunked", "triton"),
        causal=options.get("causal", True),
    )


# FLuRKA

NEAR = {"gated": "softmax", "shared": "softmax", "kernel": "kernel"}


def flurka_leaves(
    length: int,
    draw: torch.Generator,
    *,
    form: str,
    feature_map: str,
    per_head: bool,
    keys: int,
    decays: bool,
) -> Leaves:
    leaves = qkv(length, draw, keys=keys)
    pool = (KV_HEADS, RANK, BLOCK) if per_head else (RANK, BLOCK)
    leaves |= {name: normal(draw, *pool).softmax(-1) for name in ("pool_keys", "pool_values")}
    if feature_map == "favor":
        leaves["projection"] = normal(draw, KV_HEADS, 6, WIDTH)
    if form == "gated":
        leaves["gate"] = normal(draw, BATCH, HEADS, length)
        leaves["gate_weight"] = normal(draw, HEADS, WIDTH)
    elif form == "shared":
        leaves["far_weight"] = normal(draw, HEADS)
    if form == "kernel":
        leaves["far_mass"] = normal(draw, KV_HEADS)
    if keys:
        leaves["priors"] = normal(draw, KV_HEADS, keys).square()
    if decays:
        leaves["log_decay"] = -normal(draw, BATCH, KV_HEADS, length).abs()
    return leaves


def call_flurka(leaves: Leaves, positions: Positions, state: Any, backend: str, **options):
    options = {"rotary": Rotary(WIDTH), **options}
    return flurka_attention(**leaves, **options, positions=positions, initial_state=state, backend=backend)


def flurka_case(
    form: str, feature_map: str, blocks: int, far_rope: str, *, keys: int = 0, decays: bool = False
) -> OpCase:
    options = {"near": NEAR[form], "feature_map": feature_map, "blocks": blocks, "far_rope": far_rope}
    per_head = (feature_map == "favor") == (blocks == 1)
    sizes = {"per_head": per_head, "keys": keys, "decays": decays}
    # Kernels do not rotate landmarks.
    backends = ("chunked", "triton") if far_rope == "none" else ("chunked",)
    return OpCase(
        partial(call_flurka, **options),
        partial(flurka_leaves, form=form, feature_map=feature_map, **sizes),
        QKV | {"gate": -1, "log_decay": -1},
        backends,
    )


# Softmax over pairs


def call_stateful(leaves: Leaves, positions: Positions, state: Any, backend: str, *, op: Callable, **options):
    return op(**leaves, **options, positions=positions, initial_state=state, backend=backend)


def call_bidirectional(
    leaves: Leaves, positions: Positions, _: Any, backend: str, *, op: Callable, **options
):
    return op(**leaves, **options, positions=positions, backend=backend, causal=False)[0], None


def attention_case(op: Callable, leaves: Callable = qkv, /, *, backends=("chunked",), **options) -> OpCase:
    return OpCase(partial(call_stateful, op=op, **options), leaves, QKV, backends)


def bidirectional_case(
    op: Callable, leaves: Callable = qkv, /, *, backends=("chunked",), **options
) -> OpCase:
    call, per_token = partial(call_bidirectional, op=op, **options), QKV | {"key_mask": -1}
    return OpCase(call, leaves, per_token, backends, causal=False, continues=False)


def masked_leaves(length: int, draw: torch.Generator) -> Leaves:
    return qkv(length, draw) | {"key_mask": torch.rand(BATCH, length, generator=draw) > 0.3}


def weighted_leaves(length: int, draw: torch.Generator) -> Leaves:
    return qkv(length, draw, keys=2) | {"key_weights": normal(draw, 1, KV_HEADS, 2, 1).square()}


KINDS = {
    "softmax": {"similarity": "softmax"},
    "gaussian": {"similarity": "gaussian"},
    "kernelized": {"similarity": "gaussian", "normalize": False},
    "uneven_variances": {"similarity": "gaussian", "variances": (1.0, 1 / 3)},
    "hard": {"similarity": "gaussian", "join": "max"},
    "hard_softmax": {"similarity": "softmax", "join": "max"},
}
"""Name -> options of weighted attention."""


# Chosen blocks


def call_selected(leaves: Leaves, positions: Positions, state: Any, backend: str, *, rank: int, **options):
    part = torch.arange(3) * rank // 3 == torch.arange(rank)[:, None]
    pool = part.double() / part.sum(1, keepdim=True)
    options |= {"pool": pool, "positions": positions, "initial_state": state, "backend": backend}
    return selected_attention(**leaves, **options)


def selected_case(form: str, unit: str, *, rank: int = 2, selected: int = 2, **options) -> OpCase:
    return OpCase(
        partial(call_selected, rank=rank, unit=unit, selected=selected, **options),
        qkv,
        QKV,
        backends=("chunked", "triton") if form == "by block" else ("chunked",),
        constants=(
            (chunked, "MASKED", 0 if form == "by block" else 10**9),
            (masked, "ROWS", 8),
            (choice, "ROWS", 5),
            (grouped, "ROWS", 5),
            (readers, "NUMBERS_ON_CPU", 64),
            (readers, "GROUP", 3),
        ),
        state=lambda state: [] if state is None else [state.choice.double()],
    )


# States that decay


def decaying_leaves(length: int, draw: torch.Generator, *, delta: bool = False) -> Leaves:
    leaves = qkv(length, draw, values=WIDTH + 1)
    # Little in the first key head, nearly completely in the last.
    rates = torch.tensor([0.05, 3.0], dtype=torch.float64)[:, None]
    leaves["log_decay"] = -rates * torch.rand(BATCH, KV_HEADS, length, generator=draw, dtype=torch.float64)
    if delta:
        leaves["k"] = torch.nn.functional.normalize(leaves["k"], dim=-1)
        leaves["strength"] = torch.rand(BATCH, KV_HEADS, length, generator=draw, dtype=torch.float64)
    return leaves


def decaying_case(op: Callable, *, delta: bool = False) -> OpCase:
    per_token = QKV | {"log_decay": -1} | ({"strength": -1} if delta else {})
    return OpCase(
        partial(call_stateful, op=op),
        partial(decaying_leaves, delta=delta),
        per_token,
        ("chunked", "triton"),
    )


# Short convolution

TAPS = 4


def convolution_leaves(length: int, draw: torch.Generator) -> Leaves:
    return {
        "q": normal(draw, BATCH, KV_HEADS, 3, length, WIDTH),
        "weight": normal(draw, KV_HEADS, 3, WIDTH, TAPS),
    }


def call_convolution(leaves: Leaves, positions: Positions, before: Tensor | None, backend: str):
    """The state is the last TAPS - 1 tokens."""
    x = leaves["q"]
    if before is None:
        before = x.new_zeros(*x.shape[:-2], TAPS - 1, x.shape[-1])
    out = short_convolution(x, leaves["weight"], before, positions, backend=backend)
    return out, torch.cat([before, x], -2)[..., -(TAPS - 1) :, :]


# Nyströmformer and Skyformer


def call_nystrom(leaves: Leaves, _: Positions, __: Any, backend: str):
    length = leaves["q"].shape[2]
    segments = (torch.arange(length) * 5 // length).expand(BATCH, -1)
    options = {"segments": segments, "count": 5, "backend": backend}
    return nystrom_attention.nystrom_attention(**leaves, **options), None


def call_skyformer(leaves: Leaves, _: Positions, __: Any, backend: str):
    rows = torch.arange(7) * 2 * leaves["q"].shape[2] // 7
    return skyformer_attention.skyformer_attention(**leaves, landmarks=rows, backend=backend), None


def landmarks_case(call: Callable, leaves: Callable = qkv, refusals: Any = ATTENTION_REFUSALS) -> OpCase:
    options = {"causal": False, "continues": False, "packs": False, "refusals": refusals}
    return OpCase(call, leaves, QKV, **options)


# BigBird, Informer and Reformer


def call_bigbird(leaves: Leaves, _: Positions, __: Any, backend: str):
    count = -(-leaves["q"].shape[2] // 3)
    draws = torch.randint(2**31, (HEADS, count, 2), generator=torch.Generator().manual_seed(0))
    blocks = bigbird_attention.choose_blocks(draws, torch.tensor([count]), 1)
    options = {"random_blocks": blocks, "block_size": 3, "backend": backend}
    return bigbird_attention.bigbird_attention(**leaves, **options), None


def call_informer(leaves: Leaves, _: Positions, __: Any, backend: str):
    length = leaves["q"].shape[2]
    number = Informer(factor=1).number(length)
    draws = torch.randint(length, (HEADS, length, number), generator=torch.Generator().manual_seed(0))
    options = {"sampled": lambda places: draws[None, :, places], "limit": number, "backend": backend}
    chosen = torch.full((BATCH,), number)
    return informer_attention.informer_attention(**leaves, **options, chosen=chosen), None


def call_reformer(leaves: Leaves, _: Positions, __: Any, backend: str):
    rotations = normal(torch.Generator().manual_seed(0), HEADS, 2, WIDTH, 2)
    options = {"rotations": rotations, "chunk_size": 4, "backend": backend}
    return reformer_attention.reformer_attention(**leaves, **options), None


def shared_queries(length: int, draw: torch.Generator) -> Leaves:
    leaves = qkv(length, draw)
    return {"q": leaves["q"], "v": leaves["v"]}


REFORMER_REFUSALS = tuple((change, message) for change, message in ATTENTION_REFUSALS if "k" not in change)

SELECTIONS = {
    "plain": {"blocks": 1, "score": "max"},
    "rotated": {"blocks": 2, "score": "lse", "rotary": Rotary(WIDTH)},
    "unrotated choice": {"blocks": 2, "score": "max", "rotary": Rotary(WIDTH), "rotates_chosen": False},
    "unrotated choice, YaRN": {
        "blocks": 1,
        "score": "max",
        "rotary": Rotary(WIDTH, scaling=RopeScaling(kind="yarn", factor=16, original_seq_len=8)),
        "rotates_chosen": False,
    },
    "in groups": {"blocks": 1, "score": "max", "group": 2, "rank": 3, "selected": 1},
    "in groups of two blocks": {
        "blocks": 2,
        "score": "lse",
        "group": 2,
        "rotary": Rotary(WIDTH),
        "selected": 1,
    },
}
FORMS = ("masked", "by block")
WEIGHTED = {"backends": ("chunked", "triton")}

CASES: dict[str, OpCase] = {
    **{
        f"kernel {name}": kernel_case(name, kv_heads=kv_heads)
        for name, kv_heads in (("elu", 1), ("favor", 2), ("hedgehog", 4), ("relu", 2), ("identity", 1))
    },
    **{
        f"kernel {name} bidirectional": kernel_case(name, causal=False, kv_heads=kv_heads)
        for name, kv_heads in (("elu", 2), ("favor", 4), ("hedgehog", 1), ("relu", 4), ("identity", 2))
    },
    "kernel elu unnormalized": kernel_case("elu", normalize=False),
    "kernel favor unnormalized": kernel_case("favor", normalize=False),
    "kernel elu mixture": kernel_case("elu", keys=3),
    "kernel favor mixture": kernel_case("favor", keys=3),
    "kernel favor mixture bidirectional": kernel_case("favor", keys=3, causal=False),
    **{
        f"flurka {form} {feature_map} {blocks} {far_rope}": flurka_case(form, feature_map, blocks, far_rope)
        for number, (form, feature_map, blocks) in enumerate(product(NEAR, ("elu", "favor"), (1, 2)))
        # Every triple of values, but for the last with each pair of the others.
        for far_rope in [
            ("none", "centroid", "centroid", "none")[number % 4 if number // 4 % 2 else 3 - number % 4]
        ]
    },
    "flurka gated elu decays": flurka_case("gated", "elu", 1, "none", decays=True),
    "flurka shared favor decays": flurka_case("shared", "favor", 2, "none", decays=True),
    **{
        f"flurka {form} {feature_map} mixture": flurka_case(form, feature_map, 1, "centroid", keys=3)
        for form, feature_map in zip(NEAR, ("elu", "favor", "elu"))
    },
    **{
        f"weighted {kind}": attention_case(weighted_attention, weighted_leaves, **WEIGHTED, **options)
        for kind, options in KINDS.items()
    },
    **{
        f"weighted {kind} bidirectional": bidirectional_case(
            weighted_attention, weighted_leaves, **WEIGHTED, **options
        )
        for kind, options in KINDS.items()
    },
    "softmax": attention_case(softmax_attention),
    "softmax softcap": attention_case(softmax_attention, softcap=0.3),
    "softmax window": attention_case(softmax_attention, window=5),
    "softmax window softcap": attention_case(softmax_attention, window=5, softcap=0.3),
    "softmax bidirectional": bidirectional_case(softmax_attention),
    "softmax masked": bidirectional_case(softmax_attention, masked_leaves),
    "window": attention_case(window_attention, block_size=BLOCK),
    "window of two blocks": attention_case(window_attention, block_size=BLOCK, blocks=2),
    **{
        f"selected {form} {unit} {name}": selected_case(form, unit, **options)
        for number, (form, (name, options)) in enumerate(product(FORMS, SELECTIONS.items()))
        for unit in [("tile", "token")[number % 2]]
    },
    "simple_gla": decaying_case(simple_gla),
    "gated_delta_rule": decaying_case(gated_delta_rule, delta=True),
    "short_convolution": OpCase(
        call_convolution, convolution_leaves, {"q": -2}, ("chunked", "triton"), refusals=()
    ),
    "nystrom": landmarks_case(call_nystrom),
    "skyformer": landmarks_case(call_skyformer),
    "bigbird": landmarks_case(call_bigbird),
    "informer": landmarks_case(call_informer),
    "reformer": landmarks_case(call_reformer, shared_queries, REFORMER_REFUSALS),
}
"""Name -> case."""

BACKENDS = [(name, backend) for name, case in CASES.items() for backend in ("reference", *case.backends)]


def make(name: str, length: int, *, dtype: torch.dtype = torch.float64, device: Any = "cpu") -> Leaves:
    """Leaves of a case, rounded to `dtype`."""
    drawn = CASES[name].leaves(length, torch.Generator().manual_seed(0))
    return {key: x.to(device, dtype if x.is_floating_point() else x.dtype) for key, x in drawn.items()}


def part_of(name: str, leaves: Leaves, tokens: slice) -> Leaves:
    """The leaves of some of the tokens."""
    axes = CASES[name].per_token
    return {
        key: x[(..., tokens, *[slice(None)] * (-axes[key] - 1))] if key in axes else x
        for key, x in leaves.items()
    }


def of_sequence(leaves: Leaves, sequence: int) -> Leaves:
    """The leaves of one sequence of the batch, as a batch of one."""
    return {
        key: x[sequence : sequence + 1] if key in BATCHED and x.shape[0] == BATCH else x
        for key, x in leaves.items()
    }


BATCHED = ("q", "k", "v", "gate", "log_decay", "strength", "key_weights", "key_mask")
"""Leaves whose first dimension is the batch, if it has its size."""
