"""What the number of processes has to fit."""

from .errors import ConfigError, Problem, nearest_multiples
from .tree import Config


def data_parallel_size(config: Config, world_size: int) -> int:
    """Replicas of the model in `world_size` processes, which are tensor x context x data x pipeline.

    ConfigError where the processes or the global batch do not divide, with the nearest numbers that do.
    """
    parallel, training = config.parallel, config.training
    if world_size % parallel.model_size:
        product = f"{parallel.tensor} x {parallel.context} x {parallel.pipeline}"
        reason = (
            f"is not a multiple of parallel.tensor x context x pipeline = {product} = {parallel.model_size}"
        )
        remedy = f"start {nearest_multiples(world_size, parallel.model_size)} or change parallel"
        raise ConfigError([Problem("processes", world_size, reason, remedy)])
    replicas = world_size // parallel.model_size
    unit = training.micro_batch_size * replicas
    if training.global_batch_size % unit:
        product = f"{training.micro_batch_size} x {replicas}"
        reason = f"is not a multiple of micro_batch_size x data parallel = {product} = {unit}"
        remedy = f"set {nearest_multiples(training.global_batch_size, unit)}"
        raise ConfigError([Problem("training.global_batch_size", training.global_batch_size, reason, remedy)])
    return replicas
