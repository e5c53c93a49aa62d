"""What changes with the step: the learning rate, and how often near windows are shut.

Both are functions of the step alone, so that a continued run needs no scheduler's state.
"""

import math

from torch import nn

from megakernel.attention.flurka import FlurkaAttention
from megakernel.config import Schedule, UserError
from megakernel.config.training import NearDropout
from megakernel.model.layer import attention_cores


def learning_rate(step: int, schedule: Schedule, peak: float, total_steps: int) -> float:
    """The learning rate of the update made in `step` of a run of `total_steps`, counted from 0.

    The run is the part of its schedule behind `steps_before` and before `steps_after`: below, steps are the schedule's.

    Warmup of w steps gives peak * (step + 1) / w: no update is wasted on a rate of 0, and step w - 1 has
    the peak exactly (step 0 where there is no warmup). Decays then reach min_lr_ratio * peak exactly at
    their last step, and stay there.

    cosine, linear: over schedule.decay_steps steps after the peak, or up to the last step of training.
    wsd: stays at the peak, then falls linearly over the last decay_steps steps (None: a tenth of training).
    inverse_sqrt: peak * sqrt(w / (step + 1)), never below the floor.
    constant: the peak.
    """
    step += schedule.steps_before
    total_steps += schedule.steps_before + schedule.steps_after
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
    # How much of the way is done, 0 to 1.
    share = min(max(step - start, 0) / max(end - start, 1), 1.0)
    if schedule.name == "cosine":
        share = 0.5 - 0.5 * math.cos(math.pi * share)
    return peak * (1.0 - share + floor * share)


def drop_near_windows(model: nn.Module, dropout: NearDropout, seed: int) -> None:
    """Let gated FLuRKA layers of a model shut the near windows of heads in training, as `dropout` says.

    What `Engine.redraw(step)` tells the model chooses the heads; evaluation shuts none.

    Raises:
        UserError: this process holds FLuRKA layers and none has a gate.
    """
    cores = {
        index: core for index, core in attention_cores(model).items() if isinstance(core, FlurkaAttention)
    }
    gated = {index: core for index, core in cores.items() if core.is_gated}
    if cores and not gated:
        raise UserError(
            "near dropout shuts gates, and model.attention has none; take near: {kind: softmax, join: gated} "
            "or leave it out"
        )
    for index, core in gated.items():
        core.drop_near(dropout.probability, (seed, index))
