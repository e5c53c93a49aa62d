"""Which checkpoints `megakernel analyze --at-accuracy` chooses."""

import json
import re

import pytest

from megakernel.analysis.plots.run import steps_at_accuracy
from megakernel.config import UserError


def run_folder(folder, accuracies, kept):
    """A run with these accuracies by step, losses between them, and checkpoints of the steps `kept`."""
    lines = [{"step": step, "eval/accuracy": accuracy} for step, accuracy in accuracies.items()]
    lines += [{"step": 15, "train/loss": 1.0}, {"step": 45, "eval/accuracy": None}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in kept:
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return folder


ACCURACIES = {0: 0.1, 10: 0.5, 20: 0.3, 30: 0.85, 40: 0.7}


def test_a_level_has_the_first_kept_checkpoint_at_or_above_it(tmp_path):
    run = run_folder(tmp_path, ACCURACIES, kept=[10, 20, 30, 40, 45])
    assert steps_at_accuracy(run, [0.2, 0.5, 0.6, 0.85]) == {0.2: 10, 0.5: 10, 0.6: 30, 0.85: 30}


def test_a_step_without_a_checkpoint_is_passed_over(tmp_path):
    run = run_folder(tmp_path, ACCURACIES, kept=[20, 40])
    assert steps_at_accuracy(run, [0.2, 0.5]) == {0.2: 20, 0.5: 40}


@pytest.mark.parametrize(
    ("accuracies", "kept", "reason"),
    [
        (
            ACCURACIES,
            [20, 40],
            "no kept checkpoint of {} has it; the best is 0.7000 at step 40, so give at most that",
        ),
        (ACCURACIES, [15], "{} has no checkpoint of a step that was evaluated"),
        ({}, [10], "{} has no checkpoint of a step that was evaluated"),
    ],
    ids=["too high", "checkpoints between evaluations", "not a classifier"],
)
def test_an_accuracy_of_no_checkpoint_is_refused_with_the_remedy(tmp_path, accuracies, kept, reason):
    run = run_folder(tmp_path, accuracies, kept)
    with pytest.raises(UserError, match=re.escape(f"--at-accuracy 0.8: {reason.format(run)}")):
        steps_at_accuracy(run, [0.8])
