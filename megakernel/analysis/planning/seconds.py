"""The seconds of a step: its FLOPs at the share of the peak that the nearest measured step reached.

Nothing else is predicted about time: a model of each part's time was 1.4 to 1.7 times too fast.
"""

from math import log

from megakernel.config import Config
from megakernel.model.flops import training_flops_per_token
from megakernel.model.parameters import parameter_count

from .gpus import GPUS, Gpu, MeasuredStep


def tokens_per_step(config: Config) -> int:
    """Tokens of one step of all devices."""
    training = config.training
    return training.global_batch_size * config.model.sequences_per_sample * training.seq_len


def step_flops(config: Config, vocab_size: int) -> float:
    """FLOPs of one step of all devices without recomputation: the numerator of MFU."""
    sizes = (config.training.seq_len, vocab_size, config.predicted_share)
    return tokens_per_step(config) * training_flops_per_token(config.model, *sizes)


def nearest_measured(config: Config, vocab_size: int, gpu: Gpu) -> MeasuredStep | None:
    """The step measured on this GPU that is nearest in parameters and length; None if there is none in this dtype."""
    if config.training.dtype != "bfloat16":
        return None
    parameters = parameter_count(config.model, vocab_size, config.training.seq_len)

    def distance(measured: MeasuredStep) -> float:
        tokens = config.training.seq_len / measured.seq_len
        return abs(log(parameters / measured.parameters)) + abs(log(tokens))

    return min(gpu.measured, key=distance, default=None)


def step_seconds(config: Config, vocab_size: int, devices: int, gpu: Gpu) -> float | None:
    """Seconds of a step on `devices` GPUs at the nearest measured share of the peak; None if none was measured."""
    measured = nearest_measured(config, vocab_size, gpu)
    if measured is None:
        return None
    return step_flops(config, vocab_size) / (devices * gpu.peak * measured.middle)


def seconds_line(config: Config, vocab_size: int, devices: int, gpu: Gpu) -> str:
    """All that is predicted about the time of a step, on one line."""
    work = f"{step_flops(config, vocab_size) / devices:.3g} FLOPs per GPU"
    measured = nearest_measured(config, vocab_size, gpu)
    seconds = step_seconds(config, vocab_size, devices, gpu)
    if measured is None or seconds is None:
        others = ", ".join(one.name for one in GPUS.values() if one.measured)
        dtype = config.training.dtype
        return f"step: {work}; no seconds, as no {dtype} step was measured on {gpu.name} (only on {others})"
    least, most, middle = *measured.mfu, measured.middle
    return (
        f"step: {seconds:.3g} s, {tokens_per_step(config) / seconds:,.0f} tokens/s: {work} at {middle:.1%} MFU, the "
        f"middle of {least:.0%} to {most:.0%} measured with {measured.what} ({measured.source}); measured/predicted so "
        f"far {middle / most:.2f} to {middle / least:.2f}, of that run alone; traffic between GPUs, recomputation and "
        "a pipeline's idle time come on top"
    )
