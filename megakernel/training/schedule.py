"""The learning rate and near dropout, as functions of the step alone: resuming needs no scheduler state."""

import math

from megakernel.attention.flurka import FlurkaAttention
from megakernel.config import Schedule, UserError
from megakernel.config.training import NearDropout
from megakernel.model import LocalModel
from megakernel.model.layer import attention_cores


def learning_rate(step: int, schedule: Schedule, peak: float, total_steps: int) -> float:
    """The learning rate of `step`, counted from 0, of a run of `total_steps`.

    The run is the part of its schedule after `part.steps_before` and before `part.steps_after`; below, steps are those
    of the schedule.

    Warmup over w steps is peak * (step + 1) / w: no step has rate 0, and step w - 1 (step 0 without warmup) has the
    peak. Decays reach min_lr_ratio * peak exactly at their last step, and stay there.

    cosine, linear: decay over schedule.decay_steps steps after the peak, or until the last step of training.
    wsd: the peak, then linear decay over the last decay_steps steps (None: a tenth of training).
    inverse_sqrt: peak * sqrt(w / (step + 1)), at least min_lr_ratio * peak.
    constant: the peak.
    """
    step += schedule.part.steps_before
    total_steps += schedule.part.steps_before + schedule.part.steps_after
    warmup, floor = schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    at_peak, last = max(warmup - 1, 0), total_steps - 1
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        return peak * max(math.sqrt((at_peak + 1) / (step + 1)), floor)
    start, end = at_peak, last
    if schedule.name == "wsd":
        start = max(at_peak, last - (schedule.decay_steps or max(total_steps // 10, 1)))
    elif schedule.decay_steps is not None:
        end = at_peak + schedule.decay_steps
    # Completed share of the decay, 0 to 1.
    share = min(max(step - start, 0) / max(end - start, 1), 1.0)
    if schedule.name == "cosine":
        share = 0.5 - 0.5 * math.cos(math.pi * share)
    return peak * (1.0 - share + floor * share)


def add_near_dropout(model: LocalModel, dropout: NearDropout, seed: int) -> None:
    """Give the gated FLuRKA layers of a model near dropout; `Engine.redraw(step)` chooses the heads of a step.

    Raises UserError if no layer of the whole model has a gate; not a rule of the configuration, because older runs
    have recorded near dropout without gates.
    """
    if not model.settings.model.is_gated:
        raise UserError(
            "training.near_dropout shuts gates, and model.attention has none; take near: {kind: softmax, join: gated} "
            "or leave it out"
        )
    for index, core in attention_cores(model).items():
        if isinstance(core, FlurkaAttention) and core.is_gated:
            core.drop_near(dropout.probability, (seed, index))
