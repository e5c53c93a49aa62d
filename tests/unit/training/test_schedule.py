import itertools
import math

import pytest

from megakernel.config import Schedule
from megakernel.training.schedule import learning_rate

NAMES = ["cosine", "linear", "inverse_sqrt", "wsd", "constant"]
PEAK, TOTAL = 2e-3, 100


def curve(schedule: Schedule, total: int = TOTAL) -> list[float]:
    return [learning_rate(step, schedule, PEAK, total) for step in range(total)]


@pytest.mark.parametrize("name", NAMES)
def test_warmup_starts_above_zero_and_reaches_the_peak_on_its_last_step(name):
    rates = curve(Schedule(name=name, warmup_steps=10))
    assert rates[:10] == [PEAK * (i + 1) / 10 for i in range(10)]
    assert max(rates) == PEAK


def test_wsd_can_begin_to_decay_at_any_step_without_a_jump():
    stable, decay = (
        Schedule(name="wsd", decay_steps=5),
        Schedule(name="wsd", decay_steps=10, min_lr_ratio=0.0),
    )
    before = [learning_rate(step, stable, PEAK, TOTAL) for step in range(60)]
    after = [learning_rate(step, decay, PEAK, 70) for step in range(60, 70)]
    assert before[-1] == PEAK
    assert after == pytest.approx([PEAK * (9 - step) / 10 for step in range(10)])


@pytest.mark.parametrize("name", NAMES)
def test_without_warmup_the_first_step_has_the_peak_rate(name):
    assert curve(Schedule(name=name))[0] == PEAK


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_after_warmup_the_rate_never_rises(name, warmup):
    rates = curve(Schedule(name=name, warmup_steps=warmup))[max(warmup - 1, 0) :]
    assert all(a >= b for a, b in itertools.pairwise(rates))


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_decay_ends_at_the_floor_on_the_last_step_and_stays(name, floor):
    schedule = Schedule(name=name, warmup_steps=10, min_lr_ratio=floor)
    assert learning_rate(TOTAL - 1, schedule, PEAK, TOTAL) == floor * PEAK
    assert learning_rate(TOTAL + 50, schedule, PEAK, TOTAL) == floor * PEAK


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("total", [1, 2, 5])
def test_a_run_shorter_than_its_warmup_rises_to_the_peak(name, total):
    rates = curve(Schedule(name=name, warmup_steps=10), total)
    assert rates == [PEAK * (i + 1) / 10 for i in range(total)]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_one_step_uses_the_peak(name):
    assert curve(Schedule(name=name), total=1) == [PEAK]


def test_cosine_is_halfway_between_peak_and_floor_in_the_middle():
    schedule = Schedule(name="cosine", warmup_steps=1, min_lr_ratio=0.1)
    middle = learning_rate(50, schedule, PEAK, 101)
    assert middle == pytest.approx(0.55 * PEAK, rel=1e-12)  # (1 + 0.1) / 2
    quarter = learning_rate(25, schedule, PEAK, 101)
    assert quarter == pytest.approx(PEAK * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), rel=1e-12)


def test_linear_decays_by_equal_steps():
    rates = curve(Schedule(name="linear", warmup_steps=5, min_lr_ratio=0.0))
    drops = [a - b for a, b in itertools.pairwise(rates[4:])]
    assert drops == pytest.approx([PEAK / 95] * 95, rel=1e-9)  # cancellation of doubles near the peak


def test_decay_steps_shorten_the_decay():
    schedule = Schedule(name="cosine", warmup_steps=10, decay_steps=20, min_lr_ratio=0.1)
    assert learning_rate(9 + 20, schedule, PEAK, TOTAL) == 0.1 * PEAK
    assert learning_rate(9 + 19, schedule, PEAK, TOTAL) > 0.1 * PEAK


def test_wsd_holds_the_peak_and_decays_linearly_at_the_end():
    rates = curve(Schedule(name="wsd", warmup_steps=10, decay_steps=20, min_lr_ratio=0.0))
    assert rates[9:80] == [PEAK] * 71
    assert rates[89] == pytest.approx(PEAK / 2, rel=1e-12)
    assert rates[99] == 0.0


def test_wsd_decays_over_a_tenth_of_training_by_default():
    rates = curve(Schedule(name="wsd"))
    assert rates[89] == PEAK
    assert rates[90] < PEAK


def test_inverse_sqrt_halves_when_the_step_quadruples():
    schedule = Schedule(name="inverse_sqrt", warmup_steps=10, min_lr_ratio=0.0)
    assert learning_rate(39, schedule, PEAK, TOTAL) == pytest.approx(PEAK / 2, rel=1e-12)


def test_inverse_sqrt_stops_at_the_floor():
    schedule = Schedule(name="inverse_sqrt", warmup_steps=10, min_lr_ratio=0.5)
    assert learning_rate(90, schedule, PEAK, TOTAL) == 0.5 * PEAK


@pytest.mark.parametrize("name", NAMES)
def test_consecutive_runs_share_one_schedule(name):
    whole = curve(Schedule(name=name, warmup_steps=10))
    parts = [(0, 25), (25, 5), (30, 70)]
    found = []
    for before, count in parts:
        part = Schedule(name=name, warmup_steps=10, steps_before=before, steps_after=TOTAL - before - count)
        found += curve(part, count)
    assert found == whole
