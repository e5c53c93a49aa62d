"""DeepSpeed's configuration as a function of ours."""

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

from megakernel.config import Config, ConfigError, Problem, Training
from megakernel.config.parallel import LARGEST_BUCKET
from megakernel.config.section import merged
from megakernel.parallel import Mesh


def deepspeed_clips(config: Config) -> bool:
    """Whether DeepSpeed's optimizer wrapper clips and checks gradients; its plain float32 path does not."""
    return config.parallel.zero_stage > 0


def micro_batches_per_step(training: Training, mesh: Mesh) -> int:
    """Forward passes of one data-parallel rank per optimizer step."""
    return training.global_batch_size // (training.micro_batch_size * mesh.dp.size)


def deepspeed_config(config: Config, mesh: Mesh) -> dict[str, Any]:
    """What `deepspeed.initialize` is given; `config.deepspeed` is merged last.

    DeepSpeed's data-parallel world is ours times the context ranks, so its batch size counts each sequence shard.
    """
    accumulation = micro_batches_per_step(config.training, mesh)
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": config.training.micro_batch_size * accumulation * mesh.gradient.size,
        "gradient_clipping": config.optimizer.clip_grad_norm if deepspeed_clips(config) else 0.0,
        "zero_optimization": {"stage": config.parallel.zero_stage},
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


def fit_buckets(ds_config: dict[str, Any], model: nn.Module) -> None:
    """Let ZeRO's buffer be no larger than the gradients of the model, which is built whole on every rank."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    ds_config["zero_optimization"].setdefault("reduce_bucket_size", min(trained, LARGEST_BUCKET))


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
