"""Windows and chosen blocks: both forms equal the reference, and what a choice may depend on."""

import pytest
import torch

from megakernel.attention.rotary import Rotary
from megakernel.config.rope import RopeScaling
from megakernel.ops.selected_attention import choice, chunked, masked, readers, selected_attention
from megakernel.ops.softmax_attention import softmax_attention
from megakernel.ops.window_attention import window_attention
from tests.unit.ops.comparing import random

B, H, KV, N, WIDTH, BLOCK = 2, 4, 2, 23, 4, 3
FORMS = ("masked", "by block")


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """One of the two chunked forms, in small pieces."""
    monkeypatch.setattr(chunked, "MASKED", 0 if request.param == "by block" else 10**9)
    monkeypatch.setattr(masked, "ROWS", 8)
    monkeypatch.setattr(choice, "ROWS", 5)
    monkeypatch.setattr(readers, "NUMBERS_ON_CPU", 64)
    monkeypatch.setattr(readers, "GROUP", 3)
    return request.param


def means(landmarks: int, block: int = BLOCK) -> torch.Tensor:
    part = torch.arange(block) * landmarks // block == torch.arange(landmarks)[:, None]
    return part.double() / part.sum(1, keepdim=True)


def inputs(length: int = N):
    return [random(B, heads, length, WIDTH, seed=heads + i) for i, heads in enumerate((H, KV, KV))]


@pytest.mark.parametrize("unit", ["tile", "token"])
@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1])
def test_short_sequences_equal_causal_softmax(form, unit, length):
    q, k, v = inputs(length)
    out, _ = selected_attention(q, k, v, pool=means(1), selected=4, unit=unit, blocks=2)
    torch.testing.assert_close(out, softmax_attention(q, k, v)[0], rtol=1e-12, atol=1e-12)


def test_choosing_every_block_equals_causal_softmax(form):
    q, k, v = inputs()
    out, _ = selected_attention(q, k, v, pool=means(3), selected=N, rotary=Rotary(WIDTH))
    rotated = Rotary(WIDTH).rotate_qk(q, k, 0)
    torch.testing.assert_close(out, softmax_attention(*rotated, v)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("last", [1, 5])
def test_unrotated_blocks_have_the_temperature_of_the_window(form, last):
    """YaRN multiplies queries and keys by a factor, which chosen blocks need as the window does; `last` at the end."""
    scaling = {"kind": "yarn", "factor": 16, "original_seq_len": 8}
    scaled = Rotary(WIDTH, scaling=RopeScaling(**scaling))
    unscaled = Rotary(WIDTH, scaling=RopeScaling(**scaling, attention_factor=1))
    q, k, v = inputs()
    assert scaled.scale > 1.2
    outputs = []
    for queries, rotary in ((q, scaled), (q * scaled.scale**2, unscaled)):
        options = {"pool": means(1), "selected": 2, "rotary": rotary, "rotates_chosen": False}
        whole = selected_attention(queries, k, v, **options)[0]
        first, state = selected_attention(*(x[:, :, :-last] for x in (queries, k, v)), **options)
        rest = [x[:, :, -last:] for x in (queries, k, v)]
        second, _ = selected_attention(*rest, **options, positions=N - last, initial_state=state)
        torch.testing.assert_close(torch.cat([first, second], 2), whole, rtol=1e-12, atol=1e-12)
        outputs.append(whole)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_a_chosen_block_is_the_one_whose_tokens_match_the_query():
    """The query at the start of the last block points at block 2, whose value is then the whole output."""
    k = torch.zeros(1, 1, 15, WIDTH, dtype=torch.float64)
    k[..., 6:9, 0] = 40.0
    q = torch.zeros_like(k)
    q[..., 12, 0] = 40.0
    v = torch.arange(15.0, dtype=torch.float64).view(1, 1, 15, 1)
    out, state = selected_attention(q, k, v, pool=means(1), selected=1, unit="tile")
    torch.testing.assert_close(out[0, 0, 12, 0], v[0, 0, 6:9].mean())
    assert state.choice.tolist() == [[[8 - 15]]]
    # The other tokens of the tile read the block, too, with equal weights on its three tokens and on their window.
    torch.testing.assert_close(out[0, 0, 14, 0], torch.cat([v[0, 0, 6:9], v[0, 0, 12:15]]).mean())


def test_equal_scores_go_to_the_earlier_blocks():
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, -1.0]])
    visible = torch.tensor([[True, True, True, True, True, False]])
    assert choice.largest(scores, visible, 2).tolist() == [[1, 2]]
    assert choice.largest(scores, visible, 4).tolist() == [[0, 1, 2, 4]]
    assert choice.largest(scores, visible, 9).tolist() == [[0, 1, 2, 3, 4, -1]]
    assert choice.largest(torch.full((1, 70), 3.0), torch.ones(1, 70, dtype=torch.bool), 3).tolist() == [
        [0, 1, 2]
    ]


@pytest.mark.parametrize("unit", ["tile", "token"])
def test_few_groups_choose_as_all_blocks_do(form, unit):
    """Up to k groups are all searched, so the choice is that of one level."""
    q, k, v = inputs(40)
    outputs = [
        selected_attention(q, k, v, pool=means(2), selected=6, unit=unit, group=group)[0]
        for group in (None, 2)
    ]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_a_group_hides_a_block_whose_neighbors_do_not_match():
    """Block 1 matches best, but the mean of its group does not: one level reads it, and two read block 3."""
    k = torch.zeros(1, 1, 18, 2, dtype=torch.float64)
    # Groups of two blocks: 0 and 1, 2 and 3; block 4 is of no complete group, and block 5 is the window.
    for block, match in enumerate((-9.0, 8.0, 3.0, 5.0, 0.0)):
        k[..., 3 * block : 3 * block + 3, 0] = match
    q = torch.zeros_like(k)
    q[..., 15, 0] = 100.0
    v = torch.arange(18.0, dtype=torch.float64).view(1, 1, 18, 1)
    one, _ = selected_attention(q, k, v, pool=means(1), selected=1)
    two, _ = selected_attention(q, k, v, pool=means(1), selected=1, group=2)
    torch.testing.assert_close(one[0, 0, 15, 0], v[0, 0, 3:6].mean())
    torch.testing.assert_close(two[0, 0, 15, 0], v[0, 0, 9:12].mean())


def test_query_heads_of_a_key_head_choose_together():
    """Both read the block that the one with the larger product asks for."""
    q = torch.zeros(1, 2, 9, 2, dtype=torch.float64)
    k = torch.zeros(1, 1, 9, 2, dtype=torch.float64)
    k[0, 0, 0:3, 0], k[0, 0, 3:6, 1] = 1.0, 1.0
    q[0, 0, 6, 0], q[0, 1, 6, 1] = 1.0, 2.0
    _, state = selected_attention(q, k, k, pool=means(1), selected=1, unit="tile")
    assert state.choice.tolist() == [[[5 - 9]]]


@pytest.mark.parametrize("unit", ["tile", "token"])
@pytest.mark.parametrize("form", ["by block"], indirect=True)
def test_memory_of_long_sequences_is_linear(form, unit, monkeypatch):
    """No tensor of the form by block has a number of elements that grows with the square of the tokens."""
    monkeypatch.setattr(readers, "NUMBERS_ON_CPU", 4096)
    monkeypatch.setattr(readers, "GROUP", 16)
    monkeypatch.setattr(choice, "ROWS", 64)
    largest = []
    for length in (1024, 4096):
        q, k, v = (random(1, 1, length, WIDTH, seed=i) for i in range(3))
        with _Largest() as found:
            out, _ = selected_attention(q, k, v, pool=means(1, 8), selected=4, unit=unit)
            out.sum().backward()
        largest.append(found.elements)
    # Landmarks of earlier blocks are scored by groups of 64 choosers.
    assert largest[1] <= 4 * largest[0]


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_nothing_chosen_is_the_window_alone():
    """Before the first complete block there is nothing to choose, whatever the number of blocks."""
    q, k, v = inputs(2 * BLOCK)
    out, _ = selected_attention(q, k, v, pool=means(1), selected=5, blocks=2)
    window, _ = window_attention(q, k, v, block_size=BLOCK, blocks=2)
    torch.testing.assert_close(out, window, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selected": 0}, "selected=0; expected at least 1"),
        ({"pool": torch.ones(3)}, r"pool has shape \(3,\); expected \(rank, block\) or \(2, rank, block\)"),
        ({"unit": "head"}, "unit='head'; expected one of 'tile', 'token'"),
        ({"score": "mean"}, "score='mean'; expected one of 'max', 'lse'"),
        ({"group": 1}, "group=1; expected None or at least 2"),
        ({"blocks": 3}, "blocks=3; expected one of 1, 2"),
    ],
)
def test_invalid_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        selected_attention(*inputs(), **{"pool": means(1), "selected": 1, **change})
