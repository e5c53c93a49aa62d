import torch

from megakernel.attention import build, redraw

LENGTH, FEATURES = 10, 4096


def layer(**changes):
    tree = {"preset": "skyformer", "skyformer": {"features": FEATURES, **changes}}
    return build(tree, num_heads=2, head_dim=4, causal=False, seed=(5, 0))


def rows(module, *counts: int) -> torch.Tensor:
    return module._landmarks(torch.tensor(counts)[:, None, None], LENGTH)


def test_landmarks_are_drawn_uniformly_from_the_real_rows_of_queries_and_keys():
    drawn = rows(layer(), LENGTH, 7)
    for count, row in zip((LENGTH, 7), drawn):
        hits = row.flatten().bincount(minlength=2 * LENGTH).double() / row.numel()
        allowed = torch.tensor([*range(count), *range(LENGTH, LENGTH + count)])
        assert hits[allowed].sum() == 1
        # 8,192 draws of one in 14 to 20: five standard deviations of a share.
        assert (hits[allowed] - 1 / (2 * count)).abs().max() < 5 * (2 * count * 8192) ** -0.5


def test_strata_draw_one_half_from_queries_and_one_from_keys():
    drawn = rows(layer(draw="stratified"), 7)
    assert ((drawn < 7).sum(-1) == FEATURES // 2).all()
    assert ((drawn >= LENGTH) & (drawn < LENGTH + 7)).sum(-1).eq(FEATURES // 2).all()


def test_heads_draw_for_themselves_unless_they_share():
    own, shared = rows(layer(), LENGTH), rows(layer(per_head=False), LENGTH)
    assert not torch.equal(own[:, 0], own[:, 1])
    assert shared.shape == (1, 1, FEATURES)


def test_every_step_draws_again_and_alike_after_a_restart():
    module, restarted = layer(), layer()
    first = rows(module, LENGTH)
    redraw(module, 1)
    second = rows(module, LENGTH)
    assert not torch.equal(first, second)
    redraw(module, 2)
    redraw(restarted, 2)
    assert torch.equal(rows(module, LENGTH), rows(restarted, LENGTH))
    # A cast of the model moves no landmark.
    assert torch.equal(rows(module.bfloat16(), LENGTH), rows(restarted, LENGTH))
