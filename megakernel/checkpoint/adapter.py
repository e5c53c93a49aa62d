"""Low-rank updates of a run as an adapter of PEFT, and such an adapter as the updates that a run begins with."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline import tokenizers
from data_pipeline.prepare import appearing_whole
from megakernel.config import Lora, Model, UserError
from megakernel.config.errors import written_to

from .conversion import UPDATED, update_name
from .dense import is_dense_checkpoint
from .dense.checkpoint import ADAPTER, tensor_shapes
from .dense.configs import plain_config
from .dense.families import FAMILIES
from .dense.tokenizer import save_tokenizer
from .export import EXPORTED_DTYPES, check_unused
from .files import CheckpointTensors
from .trained_run import TrainedRun, tokenizer_folder
from .universal import WEIGHT, WholeTensors

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What PEFT puts before the base model's names."""

_PLAIN = {
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
"""Keys of adapter_config.json -> the one value, beside none, under which an adapter is B A times alpha / rank."""


def export_adapter(
    run_folder: Path, to: Path, *, step: int | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Write adapter_config.json, adapter_model.safetensors and the tokenizer; returns adapter_config.json.

    step, dtype, to: as of `export`. Raises UserError for no run, one without low-rank updates, and one whose model no
    architecture of `transformers` has, or has in other matrices.
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
    names = _names(run.config.model, lora, f"--adapter: {run_folder}")
    wanted = None if dtype is None else EXPORTED_DTYPES[dtype]
    stored = CheckpointTensors(run.checkpoint)
    tensors = {}
    for ours, theirs in names.items():
        tensor = stored.read(ours, [WEIGHT])[WEIGHT]
        tensors[theirs] = (tensor if wanted is None else tensor.to(wanted)).contiguous()
    settings = _PLAIN | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source) if source and is_dense_checkpoint(source) else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "fan_in_fan_out": _family(run.config.model, f"--adapter: {run_folder}")[1].transposed,
        "inference_mode": True,
    }
    with written_to("--to", to), appearing_whole(to) as folder:
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        (folder / ADAPTER).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        save_tokenizer(tokenizer, folder)
    return settings


@dataclass(frozen=True)
class Adapter(WholeTensors):
    """The low-rank updates of a model under our names."""

    tensors: dict[str, Tensor]

    @property
    def names(self) -> set[str]:
        """Of A and B of each."""
        return set(self.tensors)

    def read(self, name: str, keys: Iterable[str] = (WEIGHT,)) -> dict[str, Tensor]:
        """The value of a tensor."""
        return {WEIGHT: self.tensors[name]} if WEIGHT in keys else {}


def read_adapter(folder: Path, model: Model, lora: Lora) -> Adapter:
    """An adapter of PEFT as the updates of `model`.

    Raises UserError, one line with a remedy, for a folder that holds none, or one of other matrices, ranks or shapes.
    """
    key = f"init.adapter={folder}"
    try:
        settings = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        found = load_file(folder / WEIGHTS)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{key} is no adapter in PEFT's form ({error}); give a folder with {ADAPTER} and {WEIGHTS}"
        ) from None
    for name, value in _PLAIN.items():
        if settings.get(name) not in (None, value):
            raise UserError(
                f"{key}: {name}={settings[name]!r} has no counterpart here; only {value!r} is read"
            )
    for name, own, scale in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if settings.get(name) != scale:
            raise UserError(
                f"{key} has {name}={settings.get(name)} and optimizer.lora.{own} is {scale}; set them alike"
            )
    names = _names(model, lora, key)
    if unlike := sorted(found.keys() ^ set(names.values())):
        side = "it alone" if unlike[0] in found else "the run alone"
        raise UserError(
            f"{key}: {unlike[0].removeprefix(_PREFIX)} is of {side} ({len(unlike)} tensors differ); set "
            f"optimizer.lora.targets to what its target_modules are: {', '.join(settings.get('target_modules') or ())}"
        )
    # Rows of tables are nothing that updates know.
    shapes = tensor_shapes(model.model_copy(update={"vocab_size": 1, "max_positions": 1}), lora)
    for ours, theirs in names.items():
        if tuple(found[theirs].shape) != (wanted := shapes[ours]):
            raise UserError(
                f"{key}: {theirs.removeprefix(_PREFIX)} is {tuple(found[theirs].shape)} and the model's {wanted}; give "
                "an adapter of a model of the same sizes"
            )
    return Adapter({ours: found[theirs] for ours, theirs in names.items()})


def _family(model: Model, key: str) -> tuple[str, Any]:
    config = plain_config(model, model.vocab_size or 1, 1)
    if config is None:
        raise UserError(
            f"{key}: no architecture of transformers has this model's parts, whose names PEFT's adapters have; export "
            "it merged, without --adapter"
        )
    return config["model_type"], FAMILIES[config["model_type"]]


def _names(model: Model, lora: Lora, key: str) -> dict[str, str]:
    """Our names of A and B of all updates of a model -> PEFT's.

    Raises UserError where its family has one matrix for several of ours.
    """
    kind, family = _family(model, key)
    names = {}
    for module, targets in UPDATED.items():
        theirs = family.modules[module]
        parts = targets if module != "mlp.linear_fc1" or model.is_mlp_gated else targets[-1:]
        for at, target in enumerate(parts):
            if target not in lora.targets:
                continue
            if len(theirs) != len(parts):
                raise UserError(
                    f"{key}: {kind} has {target} in one matrix with others ({theirs[0]}), of which an adapter of PEFT "
                    "has no part; leave it out of optimizer.lora.targets, or export merged, without --adapter"
                )
            for layer in range(model.num_layers):
                ours = update_name(str(model.first_layer + layer), module, target)
                base = f"{_PREFIX}{family.layers}.{layer}.{theirs[at]}"
                names[f"{ours}.down"] = f"{base}.lora_A.weight"
                names[f"{ours}.up"] = f"{base}.lora_B.weight"
    return names
