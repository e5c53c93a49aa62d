"""What the number of processes has to fit."""

from .errors import ConfigError, Problem, nearest_multiples
from .tree import Config


def data_parallel_size(config: Config, world_size: int) -> int:
    """Replicas of the model in `world_size` processes, which are tensor x context x data x pipeline.

    ConfigError where the processes or a global batch do not divide, with the nearest numbers that do.
    """
    parallel = config.parallel
    if world_size % parallel.model_size:
        product = f"{parallel.tensor} x {parallel.context} x {parallel.pipeline}"
        reason = (
            f"is not a multiple of parallel.tensor x context x pipeline = {product} = {parallel.model_size}"
        )
        remedy = f"start {nearest_multiples(world_size, parallel.model_size)} or change parallel"
        raise ConfigError([Problem("processes", world_size, reason, remedy)])
    replicas = world_size // parallel.model_size
    problems = []
    for phase in config.training.phases:
        size, micro = phase.training.global_batch_size, phase.training.micro_batch_size
        if size % (unit := micro * replicas):
            reason = f"is not a multiple of micro_batch_size x data parallel = {micro} x {replicas} = {unit}"
            problems.append(
                Problem(
                    f"{phase.key}.global_batch_size", size, reason, f"set {nearest_multiples(size, unit)}"
                )
            )
    if problems:
        raise ConfigError(problems)
    return replicas
