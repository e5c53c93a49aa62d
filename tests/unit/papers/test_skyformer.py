import torch

from megakernel.attention import build, redraw

LENGTH, FEATURES = 10, 4096


def layer(**changes):
    tree = {"preset": "skyformer", "skyformer": {"features": FEATURES, **changes}}
    return build(tree, num_heads=2, head_dim=4, causal=False, seed=(5, 0))


def landmarks(module, *counts: int) -> torch.Tensor:
    return module._landmarks(torch.tensor(counts)[:, None, None], LENGTH)


def test_landmarks_are_drawn_uniformly_from_real_queries_and_keys():
    drawn = landmarks(layer(), LENGTH, 7)
    for count, row in zip((LENGTH, 7), drawn):
        hits = row.flatten().bincount(minlength=2 * LENGTH).double() / row.numel()
        allowed = torch.tensor([*range(count), *range(LENGTH, LENGTH + count)])
        assert hits[allowed].sum() == 1
        # 8,192 draws from 14 or 20 tokens: five standard deviations of a frequency.
        assert (hits[allowed] - 1 / (2 * count)).abs().max() < 5 * (2 * count * 8192) ** -0.5


def test_stratified_draws_take_half_from_queries_and_half_from_keys():
    drawn = landmarks(layer(draw="stratified"), 7)
    assert ((drawn < 7).sum(-1) == FEATURES // 2).all()
    assert ((drawn >= LENGTH) & (drawn < LENGTH + 7)).sum(-1).eq(FEATURES // 2).all()


def test_each_head_draws_its_own_landmarks_unless_shared():
    own, shared = landmarks(layer(), LENGTH), landmarks(layer(per_head=False), LENGTH)
    assert not torch.equal(own[:, 0], own[:, 1])
    assert shared.shape == (1, 1, FEATURES)


def test_landmarks_are_redrawn_every_step_and_equal_after_a_restart():
    module, restarted = layer(), layer()
    first = landmarks(module, LENGTH)
    redraw(module, 1)
    second = landmarks(module, LENGTH)
    assert not torch.equal(first, second)
    redraw(module, 2)
    redraw(restarted, 2)
    assert torch.equal(landmarks(module, LENGTH), landmarks(restarted, LENGTH))
    # Casting the model does not change the landmarks.
    assert torch.equal(landmarks(module.bfloat16(), LENGTH), landmarks(restarted, LENGTH))
