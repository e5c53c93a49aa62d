"""An implementation is timed only if its numbers are correct."""

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.attention import machine, measuring
from benchmarks.kernels.attention.cases import Case
from benchmarks.kernels.attention.check import check, rms_ratio
from benchmarks.kernels.attention.implementations import IMPLEMENTATIONS
from benchmarks.kernels.attention.suites import SUITES
from megakernel.config import RunFailed

CPU = torch.device("cpu")
SMALL = Case(batch=2, tokens=200, heads=2, head_dim=16)


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.setitem(machine.MULTIPLIED, "cpu", 64)
    monkeypatch.setitem(machine.COPIED, "cpu", 2**16)
    return replace(SUITES["cpu"], cases=(SMALL,), implementations=("kernel elu",))


def with_changed_output(change):
    """`kernel elu` with a changed output."""
    reference = IMPLEMENTATIONS["eager elu"].build

    def build():
        run = reference()
        return lambda q, k, v: change(run(q, k, v))

    return replace(IMPLEMENTATIONS["kernel elu"], build=build)


OTHERS = ("eager elu", "kernel elu, not normalized")


@pytest.mark.parametrize("name", [*SUITES["cpu"].implementations, *OTHERS])
def test_implementations_are_correct(name):
    assert check(IMPLEMENTATIONS[name], SMALL, CPU, torch.float32).is_right


@pytest.mark.parametrize("name", SUITES["paper"].implementations)
def test_whole_layers_are_correct(name):
    case = Case(batch=1, tokens=96, heads=2, head_dim=8, rank=12)
    assert check(IMPLEMENTATIONS[name], case, CPU, torch.float32).is_right


def test_wrong_outputs_are_detected():
    comparison = check(with_changed_output(lambda out: 1.01 * out), SMALL, CPU, torch.float32)
    assert not comparison.is_right
    assert comparison.error == pytest.approx(0.01, rel=1e-3)


def test_wrong_gradients_of_correct_outputs_are_detected():
    comparison = check(
        with_changed_output(lambda out: out.detach() + 2 * (out - out.detach())), SMALL, CPU, torch.float32
    )
    assert not comparison.is_right
    assert comparison.what.startswith("d")


def test_an_error_in_only_the_last_sequence_is_detected():
    def change_last(out):
        return torch.cat([out[:-1], 1.01 * out[-1:]])

    # The full comparison uses one sequence; the spot check looks at the last.
    assert (
        check(
            with_changed_output(lambda out: change_last(out) if len(out) > 1 else out),
            SMALL,
            CPU,
            torch.float32,
        ).error
        > 1e-3
    )


def test_non_finite_numbers_have_infinite_error():
    assert rms_ratio(torch.tensor([1.0, torch.nan]), torch.ones(2)) == float("inf")


def test_nothing_is_measured_if_a_megakernel_implementation_is_wrong(suite, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "kernel elu", with_changed_output(lambda out: out + 1))
    with pytest.raises(RunFailed, match="kernel elu is wrong at B=2 N=200 H=2 d=16, so nothing is written"):
        measuring.run_suite(suite, CPU, repeats=1)


@pytest.mark.second
@pytest.mark.usefixtures("suite")
def test_layers_are_timed_without_a_gpu():
    case = Case(batch=1, tokens=96, heads=2, head_dim=8, rank=12)
    layers = replace(SUITES["paper"], cases=(case,), implementations=("flurka_rnn",))
    [(_, [row])] = measuring.run_suite(layers, CPU, repeats=1).results
    assert min(row.times.forward, row.times.both) > 0
    assert row.times.peak.both >= row.times.peak.forward


def test_times_of_a_wrong_baseline_are_left_out(suite, monkeypatch):
    baseline = replace(with_changed_output(lambda out: out + 1), is_ours=False)
    monkeypatch.setitem(IMPLEMENTATIONS, "kernel elu", baseline)
    [(_, [row])] = measuring.run_suite(suite, CPU, repeats=1).results
    assert row.times is None
    assert row.problem.startswith("wrong: ")
