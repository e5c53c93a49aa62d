"""Export of a run's low-rank updates as a PEFT adapter, and import of such an adapter as a run's initial updates."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file
from torch import Tensor

from data_pipeline import tokenizers
from data_pipeline.partial_folder import atomic_folder
from megakernel.config import Lora, Model, UserError
from megakernel.config.errors import report_write_errors

from .conversion import UPDATE_TARGETS, update_name
from .dense import is_dense_checkpoint
from .dense.checkpoint import ADAPTER, tensor_shapes
from .dense.configs import plain_config
from .dense.families import FAMILIES
from .dense.tokenizer import save_tokenizer
from .export import EXPORTED_DTYPES, check_unused, write_file
from .files import CheckpointTensors
from .fragments import WHOLE, Fragment
from .trained_run import TrainedRun, tokenizer_folder
from .whole_tensors import WEIGHT, WholeTensors

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""PEFT's prefix to the base model's parameter names."""

_FACTORS = (".lora_A.weight", ".lora_B.weight")
"""PEFT's suffixes to a module's name: of A and of B."""

_SUPPORTED_SETTINGS = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}
"""Keys of adapter_config.json -> their only supported value besides null: the update is B A times alpha / rank."""

_READ_SETTINGS = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "use_bdlora": None,
}
"""The same for keys that are not exported, because older versions of PEFT do not know them."""

_PLAIN_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of `init_lora_weights` with which PEFT leaves the base model's weights as they are."""


def export_adapter(
    run_folder: Path, to: Path, *, step: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Write adapter_config.json, adapter_model.safetensors and the tokenizer; returns adapter_config.json.

    step, dtype, to: as in `export`. Raises UserError if there is no run, if the run has no low-rank updates, if no
    architecture of `transformers` has the model's parts, or if that architecture fuses an updated matrix with others.
    """
    run = TrainedRun.find(run_folder, step)
    lora, source = run.config.optimizer.updates, run.config.init.source
    if lora is None:
        raise UserError(
            f"optimizer.trained={run.config.optimizer.trained} of {run_folder} has no low-rank updates; leave out "
            "--adapter, or give a run of optimizer.trained: lora"
        )
    check_unused(to)
    tokenizer = tokenizers.load(tokenizer_folder(run_folder), add_bos=run.config.data.add_bos)
    names = _peft_names(run.config.model, lora, f"--adapter: {run_folder}")
    target_dtype = None if dtype is None else EXPORTED_DTYPES[dtype]
    stored = CheckpointTensors(run.checkpoint)
    tensors = {}
    for name, peft_name in names.items():
        tensor = stored.read(name, [WEIGHT])[WEIGHT]
        tensors[peft_name] = (tensor if target_dtype is None else tensor.to(target_dtype)).contiguous()
    settings = _SUPPORTED_SETTINGS | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source) if source and is_dense_checkpoint(source) else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "fan_in_fan_out": _family(run.config.model, f"--adapter: {run_folder}")[1].transposed,
        "inference_mode": True,
    }
    with report_write_errors("--to", to), atomic_folder(to) as folder:
        write_file(tensors, folder / WEIGHTS)
        (folder / ADAPTER).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        save_tokenizer(tokenizer, folder)
    return settings


@dataclass(frozen=True)
class Adapter(WholeTensors):
    """The low-rank updates of a model under our names."""

    tensors: dict[str, Tensor]

    @property
    def names(self) -> set[str]:
        """Names of A and B of every update."""
        return set(self.tensors)

    def read(
        self, name: str, keys: Iterable[str] = (WEIGHT,), fragment: Fragment = WHOLE
    ) -> dict[str, Tensor]:
        """Return a fragment of a tensor's value."""
        return {WEIGHT: fragment.of(self.tensors[name])} if WEIGHT in keys else {}


def read_adapter(folder: Path, model: Model, lora: Lora) -> Adapter:
    """Read a PEFT adapter as the low-rank updates of `model`.

    Raises UserError if the folder has no adapter, or one whose matrices, rank or shapes differ from the model's.
    """
    key = f"init.adapter={folder}"
    try:
        settings = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"{ADAPTER} holds no keys")
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{key} is not a PEFT adapter ({error}); give a folder with {ADAPTER} and {WEIGHTS}"
        ) from None
    for name, value in (_SUPPORTED_SETTINGS | _READ_SETTINGS).items():
        if settings.get(name) not in (None, value):
            raise UserError(
                f"{key}: {name}={settings[name]!r} has no counterpart here; only {value!r} is read"
            )
    if (start := settings.get("init_lora_weights")) not in _PLAIN_INITIALIZATIONS:
        raise UserError(
            f"{key}: init_lora_weights={start!r} also changed the base model's weights; save it as plain LoRA, with "
            "path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    for name, our_key, scale in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if settings.get(name) != scale:
            raise UserError(
                f"{key} has {name}={settings.get(name)} and optimizer.lora.{our_key} is {scale}; set them alike"
            )
    names = _peft_names(model, lora, key)
    if mismatched := sorted(tensors.keys() ^ set(names.values())):
        side = "adapter" if mismatched[0] in tensors else "run"
        modules = sorted({name.split(".")[-3] for name in tensors if name.endswith(_FACTORS)})
        raise UserError(
            f"{key}: only the {side} has {mismatched[0].removeprefix(_PREFIX)} ({len(mismatched)} tensors differ); set "
            f"optimizer.lora.targets to what its target_modules are: {', '.join(modules)}"
        )
    # Embedding tables have no updates, so the number of their rows is arbitrary.
    shapes = tensor_shapes(model.model_copy(update={"vocab_size": 1, "max_positions": 1}), lora)
    for our_name, peft_name in names.items():
        if (shape := tuple(tensors[peft_name].shape)) != (wanted := shapes[our_name]):
            raise UserError(
                f"{key}: {peft_name.removeprefix(_PREFIX)} is {shape} and the model's {wanted}; give an adapter of a "
                "model of the same sizes"
            )
    return Adapter({our_name: tensors[peft_name] for our_name, peft_name in names.items()})


def _family(model: Model, key: str) -> tuple[str, Any]:
    config = plain_config(model, model.vocab_size or 1, 1)
    if config is None:
        raise UserError(
            f"{key}: no architecture of transformers has this model's parts, and PEFT needs its module names; export "
            "it merged, without --adapter"
        )
    return config["model_type"], FAMILIES[config["model_type"]]


def _peft_names(model: Model, lora: Lora, key: str) -> dict[str, str]:
    """Our names of A and B of all updates of a model -> PEFT's names.

    Raises UserError if the model's family fuses several of our targets into one matrix.
    """
    model_type, family = _family(model, key)
    names: dict[str, str] = {}
    for module, targets in UPDATE_TARGETS.items():
        hf_modules = family.modules[module]
        parts = targets if module != "mlp.linear_fc1" or model.is_mlp_gated else targets[-1:]
        for index, target in enumerate(parts):
            if target not in lora.targets:
                continue
            if len(hf_modules) != len(parts):
                raise UserError(
                    f"{key}: {model_type} has {target} in one matrix with others ({hf_modules[0]}), which PEFT updates "
                    "as a whole; leave it out of optimizer.lora.targets, or export merged, without --adapter"
                )
            for layer in range(model.num_layers):
                update = update_name(str(model.first_layer + layer), module, target)
                base = f"{_PREFIX}{family.layers}.{layer}.{hf_modules[index]}"
                names |= {f"{update}.{ours}": base + theirs for ours, theirs in zip(("down", "up"), _FACTORS)}
    return names
