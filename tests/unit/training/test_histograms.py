import numpy as np
import pytest
import torch

from megakernel.training.observing.histograms import SHARES, SIGNED, Histogram


def histogram(values, edges=SIGNED):
    found = Histogram()
    found.add(values, edges)
    return found


@pytest.fixture
def values():
    draw = torch.Generator().manual_seed(1)
    sizes = 10 ** (torch.rand(5000, generator=draw) * 30 - 15)
    return torch.cat([sizes * torch.randn(5000, generator=draw).sign(), torch.zeros(7)])


def test_counts_equal_those_of_numpy(values):
    found = histogram(values)
    inner = values[(values > SIGNED[0]) & (values < SIGNED[-1])]
    counts, _ = np.histogram(inner.numpy(), SIGNED.numpy())
    beyond = [int((values <= SIGNED[0]).sum()), int((values >= SIGNED[-1]).sum())]
    counts[0] += beyond[0]
    counts[-1] += beyond[1]
    assert min(beyond) > 0
    buckets = zip(SIGNED.tolist(), SIGNED.tolist()[1:])
    assert dict(found.counts) == {bucket: count for bucket, count in zip(buckets, counts) if count}
    assert (found.count, found.low, found.high) == (len(values), values.min(), values.max())
    assert found.total == pytest.approx(values.double().sum().item())
    assert found.squares == pytest.approx(values.double().square().sum().item())


def test_histograms_of_parts_add_up_to_that_of_the_whole(values):
    whole = histogram(values)
    parts = histogram(values[:1234])
    parts += histogram(values[1234:].view(-1, 1))
    assert parts.counts == whole.counts
    assert (parts.low, parts.high) == (whole.low, whole.high)
    assert parts.total == pytest.approx(whole.total)


def test_non_finite_values_are_left_out():
    assert histogram(torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])).count == 1
    assert histogram(torch.full((3,), float("nan"))) == Histogram()


def test_half_precision_values_are_counted_without_rounding():
    assert (
        histogram(torch.tensor([0.5, -2.0], dtype=torch.bfloat16)).counts
        == histogram(torch.tensor([0.5, -2.0])).counts
    )


def test_gaps_between_buckets_become_empty_buckets():
    """TensorBoard assumes that each bucket begins where the previous one ends."""
    limits, counts = histogram(torch.tensor([0.01, 0.01, 0.97, 1.0]), SHARES).limits_and_counts()
    assert limits == pytest.approx([0.02, 0.96, 0.98, 1.0])
    assert counts == [2, 0, 1, 1]
