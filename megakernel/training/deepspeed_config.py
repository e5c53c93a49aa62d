"""The DeepSpeed configuration of a run."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

from megakernel.config import Config, ConfigError, Problem, Training
from megakernel.config.errors import nearest_first
from megakernel.config.parallel import overlaps_reduction, reduce_bucket
from megakernel.config.section import merged
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh


def deepspeed_clips(config: Config) -> bool:
    """Whether DeepSpeed, not `ClippedAdamW`, clips gradients and checks that they are finite."""
    return config.parallel.zero_stage > 0


def micro_batches_per_step(training: Training, mesh: Mesh) -> int:
    """Forward passes of one data-parallel rank per optimizer step."""
    return training.global_batch_size // (training.micro_batch_size * mesh.dp.size)


def deepspeed_config(config: Config, mesh: Mesh, trained: int) -> dict[str, Any]:
    """Configuration for `deepspeed.initialize`; `config.deepspeed` is merged over it.

    trained: number of trained parameters on this rank, before ZeRO shards them. DeepSpeed's data-parallel world is
    data x context ranks, so its batch size counts each shard of a sequence.
    """
    accumulation = micro_batches_per_step(config.training, mesh)
    zero_stage = config.parallel.zero_stage
    zero = {
        "stage": zero_stage,
        "reduce_bucket_size": reduce_bucket(trained, mesh.gradient.size),
        "overlap_comm": overlaps_reduction(zero_stage, mesh.pp.size),
    }
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
        # All data ranks of a stage write some of its layers, not the first rank all of them.
        "checkpoint": {"parallel_write": {"pipeline_stage": True}},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if config.optimizer.name == "muon":
        settings["zero_allow_untested_optimizer"] = True
    if config.training.dtype == "bfloat16":
        # Each gradient is added to the float32 sums and freed as soon as backward has computed it (ZeRO 1).
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
        settings["communication_data_type"] = "fp32"
    return merged(settings, config.deepspeed)


def zero3_sharding(config: Config, mesh: Mesh) -> Callable[[nn.Module], None] | None:
    """What shards the weights of one layer as `deepspeed.initialize` would those of a whole model; None: nothing does.

    Weights that are offloaded to NVMe are left to `deepspeed.initialize`, whose files they go to.
    """
    offload = config.deepspeed.get("zero_optimization", {}).get("offload_param") or {}
    if config.parallel.zero_stage < 3 or offload.get("device") == "nvme":
        return None
    # Only the keys that say how and where weights are partitioned are read.
    keys = deepspeed_config(config, mesh, trained=1)
    first: list[Any] = []

    def shard(layer: nn.Module) -> None:
        if first:  # as DeepSpeed does with parameters that are added later
            first[0].convert_to_zero_parameters(param_list=list(layer.parameters()))
            return
        deepspeed.zero.Init(
            layer,
            data_parallel_group=mesh.gradient.group,
            config_dict_or_path=keys,
            dtype=DTYPES[config.training.dtype],
            mpu=mesh.mpu,
        )
        first.extend([*layer.parameters()][:1])

    return shard


def check_deepspeed_keys(config: Config) -> None:
    """Raise ConfigError for keys of config.deepspeed that DeepSpeed rejects, or does not know and would not look at.

    Its own errors come late and name no key.
    """
    problems = [*_checkpoint_problems(config.deepspeed)]
    for key, value in config.deepspeed.items():
        minimal = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": config.parallel.zero_stage},
        }
        settings = _RecordsReads(merged(minimal, {key: value}))
        try:
            DeepSpeedConfig(settings)
        # Wrong types, wrong values and removed keys raise many types of errors.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "write it as on https://www.deepspeed.ai/docs/config-json, or remove it"
            problems.append(
                Problem(f"deepspeed.{key}", value, f"is not what DeepSpeed reads ({reason})", remedy)
            )
            continue
        for name, section, known in settings.unread():
            remedy = f"did you mean {nearest_first(name.rpartition('.')[2], known, most=3)}?"
            problems.append(Problem(f"deepspeed.{name}", section, "is no key of DeepSpeed", remedy))
    if problems:
        raise ConfigError(problems)


def _checkpoint_problems(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that would make checkpoints other than what `Engine.load` expects."""
    sections = {name: tree.get(name) for name in ("checkpoint", "zero_optimization")}
    checkpoint, zero = (section if isinstance(section, dict) else {} for section in sections.values())
    writers = {
        "checkpoint.writer": checkpoint.get("writer"),
        "datastates_ckpt": tree.get("datastates_ckpt"),
    }
    for key, value in writers.items():
        if value is not None:
            # DeepSpeed would write files in its own time, and a checkpoint would be complete before they are.
            reason = "chooses how DeepSpeed writes checkpoints, which Megakernel does by itself"
            yield Problem(f"deepspeed.{key}", value, reason, "remove it, and set checkpoint.async_save=true")
    if checkpoint.get("load_universal"):
        reason = "has DeepSpeed read files of another kind at the next start than it writes"
        yield Problem("deepspeed.checkpoint.load_universal", True, reason, "remove it")
    if zero.get("round_robin_gradients"):
        # DeepSpeed records the places of weights as if they were in the model's order.
        reason = (
            "orders the weights otherwise than checkpoints record them, which would load as other weights"
        )
        yield Problem("deepspeed.zero_optimization.round_robin_gradients", True, reason, "remove it")
    key = "load_from_fp32_weights"
    if zero.get(key) is False:
        reason = "would continue from rounded weights, which a checkpoint does not have"
        yield Problem(f"deepspeed.zero_optimization.{key}", False, reason, "remove it")


_READ_BY_KEY = ("activation_checkpointing", "aio", "checkpoint", "data_types", "timers")
"""Sections of DeepSpeed whose keys are asked for one by one; the others are models that refuse unknown keys."""


class _RecordsReads(dict[str, Any]):
    """A configuration that records which keys DeepSpeed asks for: it has no list of those that it knows."""

    def __init__(self, tree: Mapping[str, Any], asked: set[str] | None = None):
        """asked: the set to record keys in; a copy records in that of its original."""
        super().__init__(tree)
        self._asked: set[str] = set() if asked is None else asked
        for name in _READ_BY_KEY:
            if type(section := super().get(name)) is dict:  # a copy shares the sections
                self[name] = _RecordsReads(section)

    def unread(self) -> Iterator[tuple[str, Any, set[str]]]:
        """Yield the dotted name and value of each key that nobody asked for, with the keys asked for at its place."""
        for key, value in self.items():
            if key not in self._asked:
                yield key, value, self._asked
            elif isinstance(value, _RecordsReads):
                for name, section, known in value.unread():
                    yield f"{key}.{name}", section, known

    def __copy__(self) -> "_RecordsReads":
        return _RecordsReads(self, self._asked)

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As that of a dict."""
        self._asked.add(key)
        return super().get(key, default)
