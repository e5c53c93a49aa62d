"""The DeepSpeed configuration of a run."""

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

from megakernel.config import Config, ConfigError, Problem, Training
from megakernel.config.parallel import reduce_bucket
from megakernel.config.section import merged
from megakernel.parallel import Mesh


def deepspeed_clips(config: Config) -> bool:
    """Whether DeepSpeed clips gradients and checks that they are finite; without ZeRO it does neither."""
    return config.parallel.zero_stage > 0


def micro_batches_per_step(training: Training, mesh: Mesh) -> int:
    """Forward passes of one data-parallel rank per optimizer step."""
    return training.global_batch_size // (training.micro_batch_size * mesh.dp.size)


def deepspeed_config(config: Config, mesh: Mesh, model: nn.Module) -> dict[str, Any]:
    """Configuration for `deepspeed.initialize`; `config.deepspeed` is merged over it.

    model: before ZeRO shards it. DeepSpeed's data-parallel world is data x context ranks, so its batch size counts each
    shard of a sequence.
    """
    accumulation = micro_batches_per_step(config.training, mesh)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    zero = {"stage": config.parallel.zero_stage, "reduce_bucket_size": reduce_bucket(trained)}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": config.training.micro_batch_size * accumulation * mesh.gradient.size,
        "gradient_clipping": config.optimizer.clip_grad_norm if deepspeed_clips(config) else 0.0,
        "zero_optimization": zero,
        # Use our AdamW with offload too: DeepSpeed's own has to be compiled at the first start.
        "zero_force_ds_cpu_optimizer": False,
        # By default each tensor rank sends a slice of a stage's output, as if all ranks had the same output; under
        # sequence parallelism they have different tokens.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if config.training.dtype == "bfloat16":
        # Each gradient is added to the float32 sums and freed as soon as backward has computed it (ZeRO 1).
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    return merged(settings, config.deepspeed)


def check_deepspeed_keys(config: Config) -> None:
    """Raise ConfigError for keys of config.deepspeed that DeepSpeed rejects: its errors come late and name no key."""
    problems = []
    for key, value in config.deepspeed.items():
        minimal = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": config.parallel.zero_stage},
        }
        try:
            DeepSpeedConfig(merged(minimal, {key: value}))
        # Wrong types, wrong values and removed keys raise many types of errors.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "write it as on https://www.deepspeed.ai/docs/config-json, or remove it"
            problems.append(
                Problem(f"deepspeed.{key}", value, f"is not what DeepSpeed reads ({reason})", remedy)
            )
    if problems:
        raise ConfigError(problems)
