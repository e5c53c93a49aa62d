"""The kernels of chosen blocks against the float64 reference."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megakernel.attention import Rotary
from megakernel.ops.landmark_attention import MISSING, Landmarks, LandmarkVisibility
from megakernel.ops.selected_attention import choice, choice_kernel, readers, selected_attention, triton
from megakernel.ops.selected_attention.inputs import SelectionRule
from tests.kernels.comparing import DEVICE, TOLERANCE, assert_agrees, every_dtype, random
from tests.kernels.test_flurka_attention import documents
from tests.tiers import tiered

BLOCK = 8

FORMS = {
    "token": {"unit": "token"},
    "tile": {"unit": "tile", "blocks": 2},
    "unrotated choice": {"unit": "token", "rotary": Rotary(16), "rotates_chosen": False, "blocks": 2},
    "rotated, in groups": {"unit": "token", "rotary": Rotary(16), "group": 2, "score": "lse"},
}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Tiles of 16 rows, so that a block has several groups of readers."""
    monkeypatch.setattr(triton, "ROWS", {2: 16, 4: 16})


def tokens(
    draw: torch.Generator,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    length: int = 61,
    width: int = 16,
    values: int = 10,
) -> dict[str, Tensor]:
    """q, k and v."""
    shapes = {
        "q": (batch, heads, length, width),
        "k": (batch, kv_heads, length, width),
        "v": (batch, kv_heads, length, values),
    }
    return {name: torch.randn(shape, generator=draw).to(DEVICE, dtype) for name, shape in shapes.items()}


def run(backend: str, leaves: dict[str, Tensor], *, size: int = BLOCK, **options) -> dict[str, Tensor]:
    pool = torch.full((1, size), 1 / size, device=DEVICE)
    options = {"selected": 2, "unit": "token", **options}
    return {"out": selected_attention(**leaves, pool=pool, backend=backend, **options)[0]}


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("form", FORMS)
@every_dtype
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_form_agrees(form, kv_heads, dtype, draw):
    leaves = tokens(draw, dtype, heads=2 * kv_heads, kv_heads=kv_heads)
    assert_agrees(partial(run, **FORMS[form]), leaves, draw, TOLERANCE[dtype])


@pytest.mark.parametrize("unit", tiered(["token", "tile"], ["token"]))
def test_documents_agree(unit, draw):
    leaves = tokens(draw, torch.float32, batch=2, length=70)
    # Documents end inside blocks and at their ends; the first one of the second sequence sees no block.
    ends = documents(torch.device(DEVICE), 0, 8, 11, 52, 70), documents(torch.device(DEVICE), 0, 15, 70)
    assert_agrees(partial(run, unit=unit, positions=torch.cat(ends)), leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.parametrize("length", tiered([2, 8, 9, 17, 64], [2, 17]))
def test_any_length_agrees(length, draw):
    leaves = tokens(draw, torch.float32, length=length)
    assert_agrees(run, leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.second
@every_dtype
@pytest.mark.parametrize(("width", "size"), [(64, 16), (128, 64), (24, 40)])
def test_wide_heads_and_large_blocks_agree(width, size, dtype, draw):
    leaves = tokens(draw, dtype, length=3 * size + 5, width=width, values=width)
    assert_agrees(partial(run, size=size, selected=1), leaves, draw, TOLERANCE[dtype])


@pytest.mark.second
def test_a_group_of_heads_that_is_no_power_of_two_agrees(draw):
    leaves = tokens(draw, torch.float32, heads=3)
    assert_agrees(run, leaves, draw, TOLERANCE[torch.float32])


@pytest.mark.second
def test_two_runs_are_bit_identical():
    def outputs() -> list[Tensor]:
        leaves = {name: random(1, 2, 60, 16, seed=i).requires_grad_() for i, name in enumerate("qkv")}
        out = run("triton", leaves)["out"]
        return [out, *torch.autograd.grad(out.square().sum(), [*leaves.values()])]

    assert all(map(torch.equal, outputs(), outputs()))


CHOICES = {
    "one block": {"blocks": 1, "chosen": 2},
    "two tiles, two sequences of two heads": {"length": 67, "batch": 2, "kv_heads": 2},
    "more than one step": {"blocks": 20, "rank": 3},
    "log-sum-exp of three heads": {"rank": 4, "group": 3, "score": "lse"},
    "more candidates than a step has blocks": {"blocks": 40, "chosen": 20, "rank": 4, "group": 2},
    "more than the kernel takes": {"blocks": 100, "chosen": 65},
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_kernel_chooses_the_same_blocks_and_of_equal_ones_the_first(case, draw):
    assert_chooses_the_same(draw, torch.float32, **CHOICES[case])


@pytest.mark.second
def test_the_kernel_chooses_the_same_blocks_for_queries_in_bfloat16(draw):
    assert_chooses_the_same(draw, torch.bfloat16, rank=2, group=2)


def whole_numbers(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw).round().to(DEVICE)


def assert_chooses_the_same(
    draw: torch.Generator,
    dtype: torch.dtype,
    *,
    blocks: int = 12,
    chosen: int = 3,
    rank: int = 1,
    batch: int = 1,
    kv_heads: int = 1,
    group: int = 1,
    length: int = 21,
    score: str = "max",
) -> None:
    """Of whole numbers, whose products are exact and often equal, for two documents, one block missing of several."""
    width = 16  # the scale is a power of two, so that products stay exact
    queries = whole_numbers(draw, batch, kv_heads, group, length, width).to(dtype)
    keys = whole_numbers(draw, batch, kv_heads, blocks, rank, width)
    ends = torch.arange(blocks, device=DEVICE).expand(batch, -1) * BLOCK + BLOCK - 1
    if blocks > 1:
        ends = torch.where(ends == ends[0, blocks // 3], MISSING, ends)
    token = torch.arange(length, device=DEVICE) * (1 + blocks * BLOCK // length)
    second = token >= token[length // 2]
    seen = LandmarkVisibility(*(x.expand(batch, -1) for x in (second * token[length // 3], token)))
    landmarks, rule = Landmarks(keys, keys[..., :0], ends), SelectionRule(BLOCK, 1, chosen, "token", score, 0)
    expected = choice.choose_among_all(queries, landmarks, seen, rule)
    assert torch.equal(choice_kernel.choose_among_all(queries, landmarks, seen, rule), expected)
    assert (expected >= 0).any()
    assert (expected < 0).any()


@pytest.mark.parametrize("size", tiered([1, 64, 130], [130]))
def test_the_kernel_finds_the_largest_scores(size, draw):
    scores = torch.randn(2, 21, size, generator=draw).mul(4).round().to(DEVICE)
    scores[scores == 0] *= -1  # 0 and -0 are equal
    visible = (torch.rand(scores.shape, generator=draw) > 0.9).to(DEVICE)
    assert torch.equal(choice_kernel.largest(scores, visible, 5), choice.largest(scores, visible, 5))


LISTS = {
    "one head": {},
    "three heads of a key head, two sequences": {"batch": 2, "kv_heads": 2, "group": 3, "rank": 3},
    "more readers than a program has": {"length": 150, "groups": 2},
    "log-sum-exp": {"rank": 4, "score": "lse"},
    "bfloat16": {"rank": 2, "group": 2, "dtype": torch.bfloat16},
    "more landmarks than a program has": {"rank": 33, "length": 5},
}


@pytest.mark.parametrize("case", tiered([*LISTS], ["three heads of a key head, two sequences"]))
def test_the_kernel_scores_the_blocks_of_listed_groups(case, draw):
    assert_scores_the_same(draw, **LISTS[case])


def assert_scores_the_same(
    draw: torch.Generator,
    *,
    groups: int = 4,
    blocks: int = 5,
    rank: int = 1,
    batch: int = 1,
    kv_heads: int = 1,
    group: int = 1,
    length: int = 21,
    score: str = "max",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Of whole numbers, whose products are exact; queries list three groups of five blocks, the last often none."""
    width, count = 16, 18
    queries = whole_numbers(draw, batch, kv_heads, group, length, width).to(dtype)
    keys = whole_numbers(draw, batch, kv_heads, count, rank, width)
    landmarks = Landmarks(keys, keys[..., :0], torch.arange(count, device=DEVICE).expand(batch, -1))
    places = torch.randint(-1, count, (batch, groups, blocks), generator=draw).to(DEVICE)
    lists = (
        torch.rand(batch, kv_heads, length, groups, generator=draw).topk(min(3, groups)).indices.to(DEVICE)
    )
    lists[..., -1][torch.rand(lists.shape[:-1], generator=draw).to(DEVICE) > 0.5] = -1
    rule = SelectionRule(BLOCK, 1, 2, "token", score, blocks)
    expected = choice.list_scorer(queries, landmarks, rule)(queries, places, lists)
    scores = choice_kernel.list_scorer(queries, landmarks, rule)(queries, places, lists)
    # The kernel sums exponentials of base e in another order.
    torch.testing.assert_close(scores, expected, rtol=0, atol=0 if score == "max" else 1e-5)
    assert torch.equal(expected.isinf(), (lists < 0)[..., None].expand_as(expected))


def test_groups_of_a_fixed_size_hold_every_pair_once():
    lists = torch.tensor([[[0, 2], [2, -1], [1, 2]], [[-1, -1], [0, 1], [1, 2]]])
    found = readers.readers_of(lists, 3, size=2)
    assert found.queries.shape[1] == 2
    pairs = [
        (item.item() // 3, query.item() % 3, item.item() % 3)
        for item, queries, exists in zip(found.items, found.queries, found.exists)
        for query in queries[exists]
    ]
    assert sorted(pairs) == [
        (x, query, item)
        for x, rows in enumerate(lists.tolist())
        for query, row in enumerate(rows)
        for item in row
        if item >= 0
    ]
    begins = [0, *found.ends[:-1].tolist()]
    for item, (begin, end) in enumerate(zip(begins, found.ends.tolist())):
        assert found.items[begin:end].tolist() == [item] * (end - begin)
        assert found.exists[begin:end].any(1).all()
    assert not found.exists[found.ends[-1] :].any()
