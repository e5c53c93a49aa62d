"""DeepSpeed's configuration as a function of ours."""

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

from megakernel.config import Config, ConfigError, Problem, Training
from megakernel.config.parallel import reduce_bucket
from megakernel.config.section import merged
from megakernel.parallel import Mesh


def deepspeed_clips(config: Config) -> bool:
    """Whether DeepSpeed's optimizer wrapper clips and checks gradients; its plain float32 path does not."""
    return config.parallel.zero_stage > 0


def micro_batches_per_step(training: Training, mesh: Mesh) -> int:
    """Forward passes of one data-parallel rank per optimizer step."""
    return training.global_batch_size // (training.micro_batch_size * mesh.dp.size)


def deepspeed_config(config: Config, mesh: Mesh, model: nn.Module) -> dict[str, Any]:
    """What `deepspeed.initialize` is given for a model that is whole; `config.deepspeed` is merged last.

    DeepSpeed's data-parallel world is ours times the context ranks, so its batch size counts each sequence shard.
    """
    accumulation = micro_batches_per_step(config.training, mesh)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    zero = {"stage": config.parallel.zero_stage, "reduce_bucket_size": reduce_bucket(trained)}
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": config.training.micro_batch_size * accumulation * mesh.gradient.size,
        "gradient_clipping": config.optimizer.clip_grad_norm if deepspeed_clips(config) else 0.0,
        "zero_optimization": zero,
        # An offloaded optimizer is ours as well: DeepSpeed's own would have to be compiled at the first start.
        "zero_force_ds_cpu_optimizer": False,
        # By default each tensor rank sends its slice of a stage's output, as if all ranks held the same; with
        # sequence parallelism each holds other tokens.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if config.training.dtype == "bfloat16":
        ours["bf16"] = {"enabled": True, "check_grad_overflow": True}
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
        ours["communication_data_type"] = "fp32"
    return merged(ours, config.deepspeed)


def updates_on_cpu(config: Config, mesh: Mesh) -> bool:
    """Whether AdamW finds its weights in host memory."""
    offload = config.deepspeed.get("zero_optimization", {}).get("offload_optimizer", {})
    return mesh.device.type == "cpu" or offload.get("device") == "cpu"


def check_own_keys(config: Config) -> None:
    """ConfigError for keys of config.deepspeed that DeepSpeed cannot read: its own errors come late and name none."""
    found = []
    for key, value in config.deepspeed.items():
        alone = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": config.parallel.zero_stage},
        }
        try:
            DeepSpeedConfig(merged(alone, {key: value}))
        # It tells a wrong type, a wrong value and a key that it no longer has by many types of errors.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "write it as on https://www.deepspeed.ai/docs/config-json, or remove it"
            found.append(
                Problem(f"deepspeed.{key}", value, f"is not what DeepSpeed reads ({reason})", remedy)
            )
    if found:
        raise ConfigError(found)
