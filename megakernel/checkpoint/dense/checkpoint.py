"""Hugging Face checkpoint folders, read tensor by tensor."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.config import Lora, Model, UserError, validate_section, yaml_text
from megakernel.parallel import OneProcess

from ..fragments import WHOLE, Fragment
from ..whole_tensors import WEIGHT
from .families import FAMILIES, Family, layer_parts, model_section, unread_dropout
from .own import OLD_PREFIX, OWN, own_parts
from .parts import Part

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_HEAD_NAMES = tuple(dict.fromkeys(family.outside_layers["head"] for family in FAMILIES.values()))
"""Names of the head. A file may use another family's name, and may hold a tied head besides the embedding."""

_FUNCTION_KEYS = (
    "num_heads",
    "head_size",
    "activation",
    "norm",
    "norm_eps",
    "norm_placement",
    "zero_centered_norm",
    "qk_norm",
    "qk_norm_width",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "final_logit_softcapping",
    "parallel_residual",
    "normalized_residual",
    "position",
    "rotary_share",
    "rope_pattern",
    "tie_embeddings",
)
"""Attributes of a model section that change its function but not the shapes of its weights."""

_WRITTEN = {"head_size": "head_dim"}
"""Attribute -> the key that sets it, where it has another name."""


def is_dense_checkpoint(folder: Path) -> bool:
    """Whether a folder has a config.json with a model_type; the checkpoint may be incomplete."""
    return "model_type" in json_object(folder / CONFIG)


def json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file; empty if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class DenseCheckpoint:
    """A dense checkpoint under our names, as `WholeTensors`.

    Files are memory-mapped, so only tensors that are used are read. Raises UserError unless the folder is a complete
    checkpoint of a known family.
    """

    def __init__(self, folder: Path, vocab_multiple: int = 1, config: Mapping[str, Any] | None = None):
        """Read the configuration and the files' headers.

        vocab_multiple: the vocabulary is padded to a multiple of this, with zero rows. config: used instead of
        config.json, for a part of the model; other tensors of the files are ignored.
        """
        self.folder = folder
        self.vocab_multiple = vocab_multiple
        self.config = _config(folder) if config is None else config
        self.section = model_section(self.config, f"{folder / CONFIG}")
        self._files = _files(folder)
        self._open = ExitStack()
        self._readers: dict[Path, Any] = {}
        if self.section.get("tie_embeddings") and self._family is not None:
            self.section["tie_embeddings"] = self._are_tied(self._family)
        self.model = validate_section(Model, self.section, f"{folder / CONFIG}: model")
        self._check_names(is_whole=config is None)
        self._check_shapes()

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Our name -> the checkpoint's tensors that make it up."""
        if self._family is None:
            if "model" in self.config:  # an export of an earlier version
                return {name: Part((OLD_PREFIX + name,)) for name in self._expected_shapes}
            return own_parts(self._expected_shapes, self.model)
        return model_parts(self._family, self.model)

    @cached_property
    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Our name -> shape that the model section implies."""
        if self._family is None:
            return tensor_shapes(self.model)
        # Layers of a family differ only in their windows: one layer gives the shapes of all.
        one = tensor_shapes(self.model.model_copy(update={"num_layers": 1, "attention_pattern": None}))
        return {name: one[_in_one_layer(name, self.model)] for name in self.parts}

    @property
    def _family(self) -> Family | None:
        """The family that config.json names; None for our own `model_type`."""
        kind = self.config["model_type"]
        return None if kind == OWN else FAMILIES[kind]

    @property
    def names(self) -> set[str]:
        """Our names of all tensors."""
        return set(self.parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of our tensors, from the files' headers."""
        part = self.parts[name]
        joined = part.join([torch.empty(self._shape(x), device="meta") for x in part.hf_names])
        return tuple(self._padded(name, joined).shape)

    def read(
        self, name: str, keys: Iterable[str] = (WEIGHT,), fragment: Fragment = WHOLE
    ) -> dict[str, Tensor]:
        """Return a fragment of one of our tensors, in the checkpoint's dtype, under WEIGHT."""
        if WEIGHT not in keys:
            return {}
        part = self.parts[name]
        whole = self._padded(name, part.join([self._tensor(hf_name) for hf_name in part.hf_names]))
        return {WEIGHT: fragment.of(whole)}

    def differing_keys(self, model: Model) -> list[str]:
        """One line for each key with which a model section computes another function of the same weights.

        It does not compare keys that shapes determine, the attention, which up-training changes, and rotary
        frequencies, which training on longer sequences may change.
        """
        return [
            f"model.{_WRITTEN.get(key, key)}={getattr(model, key)!r} is {getattr(self.model, key)!r} in the "
            "checkpoint; set it to that"
            for key in _FUNCTION_KEYS
            if getattr(model, key) != getattr(self.model, key)
        ]

    def _padded(self, name: str, tensor: Tensor) -> Tensor:
        padding = -len(tensor) % self.vocab_multiple
        if not padding or name not in vocabulary_names(self.model):
            return tensor
        return F.pad(tensor, (0, 0, 0, padding))

    def _tensor(self, hf_name: str) -> Tensor:
        return self._reader(hf_name).get_tensor(self._stored_name(hf_name))

    def _shape(self, hf_name: str) -> tuple[int, ...]:
        return tuple(self._reader(hf_name).get_slice(self._stored_name(hf_name)).get_shape())

    def _reader(self, hf_name: str) -> Any:
        path = self._files[self._stored_name(hf_name)]
        if path not in self._readers:
            self._readers[path] = self._open.enter_context(safetensors.safe_open(path, "pt"))
        return self._readers[path]

    def _stored_name(self, hf_name: str) -> str:
        """The name by which the files hold one of the family's tensors."""
        # Files of a headless model (AutoModel) omit the prefix of all layers' names.
        prefix = "model." if self._family is None else self._family.layers.partition(".")[0] + "."
        candidates = [hf_name, hf_name.removeprefix(prefix), *(_HEAD_NAMES if hf_name in _HEAD_NAMES else ())]
        return next((name for name in candidates if name in self._files), hf_name)

    def _are_tied(self, family: Family) -> bool:
        """Whether the head equals the embedding; `transformers`, too, unties a head that differs in the files."""
        embedding = family.outside_layers["embedding"]
        head = next((name for name in _HEAD_NAMES if name in self._files), None)
        if head is None or self._stored_name(embedding) not in self._files:
            return True
        return torch.equal(self._tensor(head).float(), self._tensor(embedding).float())

    def _check_names(self, is_whole: bool) -> None:
        wanted = {self._stored_name(hf_name) for part in self.parts.values() for hf_name in part.hf_names}
        spare = _HEAD_NAMES if self.model.tie_embeddings else ()
        ignored = () if self._family is None else self._family.ignored
        extra = [
            name for name in self._files.keys() - wanted if name not in spare and not name.endswith(ignored)
        ]
        unknown = set(extra) if is_whole else set()
        for names, what in ((wanted - self._files.keys(), "misses"), (unknown, "has unknown")):
            if names:
                raise UserError(
                    f"{self.folder} {what} {len(names)} tensors of a {self.config['model_type']} model: "
                    f"{_abbreviate(sorted(names))}; download it again, or correct {CONFIG}"
                )

    def _check_shapes(self) -> None:
        wrong = [
            f"{self._stored_name(hf_name)} {stored} where {CONFIG} asks for {wanted}"
            for name, shape in self._expected_shapes.items()
            for hf_name, wanted in _hf_shapes(self.parts[name], shape)
            if (stored := self._shape(hf_name)) != wanted
        ]
        if wrong:
            raise UserError(
                f"{self.folder} has {len(wrong)} misshapen tensors of a {self.config['model_type']} model: "
                f"{_abbreviate(wrong)}; download it again, or correct {CONFIG}"
            )


def vocabulary_names(model: Model) -> tuple[str, ...]:
    """Names of the tensors with a row per token id: the token embedding and an untied head."""
    if model.tie_embeddings:
        return ("tied_modules.embedding.tokens.weight",)
    return "0.tokens.weight", f"{model.first_layer + model.num_layers + 1}.linear.weight"


def model_parts(family: Family, model: Model) -> dict[str, Part]:
    """Names of `megakernel.model.LanguageModel`'s tensors -> parts."""
    first = model.first_layer
    last = first + model.num_layers
    places = {
        "positions": "1.weight",
        "norm.weight": f"{last}.norm.weight",
        "norm.bias": f"{last}.norm.bias",
        **dict(zip(("embedding", "head"), vocabulary_names(model))),
    }
    parts: dict[str, Part] = {
        places[place]: Part((name,))
        for place, name in family.outside_layers.items()
        if place != "head" or not model.tie_embeddings
    }
    for index in range(model.num_layers):
        parts |= {f"{first + index}.{name}": part for name, part in layer_parts(family, model, index).items()}
    return parts


def tensor_shapes(model: Model, lora: Lora | None = None) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the model's tensors, without padding of the vocabulary.

    lora: its low-rank updates; None if it has none.
    """
    # Imported here because it takes seconds, which earlier errors need not wait for.
    from megakernel.model import LanguageModel, ModelSettings

    assert model.vocab_size is not None
    plain = model.model_copy(update={"vocab_multiple": 1})
    settings = ModelSettings(plain, model.vocab_size, OneProcess(), shapes_only=True, lora=lora)
    built = LanguageModel(settings)
    return {name: tuple(x.shape) for name, x in built.state_dict().items()}


def _in_one_layer(name: str, model: Model) -> str:
    """The name that a tensor would have in a model of one layer; a layer's tensor gets the first layer's name."""
    number, _, rest = name.partition(".")
    first = model.first_layer
    if not number.isdigit() or int(number) < first:
        return name
    return f"{max(first, int(number) - model.num_layers + 1)}.{rest}"


def _hf_shapes(part: Part, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each Hugging Face tensor that makes up one of the model's."""
    for hf_name, tensor in zip(part.hf_names, part.split(torch.empty(shape, device="meta"))):
        yield hf_name, tuple(tensor.shape)


def _config(folder: Path) -> Mapping[str, Any]:
    """config.json, completed with the defaults of `transformers`."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(
            f"{folder} is no Hugging Face checkpoint: it has no {CONFIG}; give a folder that "
            "`save_pretrained` or `hf download` wrote"
        )
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"{folder} has an adapter besides its weights ({ADAPTER}), which transformers adds to them; save the model "
            "after `merge_and_unload`, or remove the adapter"
        )
    written = _read_json(path)
    return hf_config(folder).to_dict() if str(written.get("model_type")) in FAMILIES else written


def hf_config(folder: Path) -> "PreTrainedConfig":
    """config.json of a known family as `transformers` completes it; UserError if `transformers` rejects it."""
    from transformers import AutoConfig  # takes seconds, which earlier errors need not wait for

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "rope_parameters", None):
            config.standardize_rope_params()  # as its models do: keys outside of rope_parameters may change them
    # Its checks of values raise many exception types.
    except Exception as error:
        kind, reason = _read_json(folder / CONFIG)["model_type"], " ".join(str(error).split())
        raise UserError(
            f"{folder / CONFIG} is no configuration of a {kind} model ({reason}); correct it"
        ) from None
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); download it again") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply for a configuration; download it again") from None
    if not isinstance(written, dict):
        raise UserError(f"{path} holds no keys; download it again")
    return written


def _files(folder: Path) -> dict[str, Path]:
    """Name of each tensor in the files -> its file."""
    index = folder / INDEX
    if index.is_file():
        weights = _read_json(index).get("weight_map")
        names = list(weights.values()) if isinstance(weights, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise UserError(f"{index} names no files; download it again")
        paths = sorted({folder / name for name in names})
    else:
        paths = [folder / ONE_FILE]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        others = sorted(path.name for path in folder.glob("*.bin"))
        pickled = f"; {others[0]} is pickled: save it again with `save_pretrained`" if others else ""
        # An interrupted `hf download --local-dir` leaves partial files.
        unfinished = any(folder.rglob("*.incomplete"))
        interrupted = "; its download was interrupted: run it again" if unfinished else ""
        raise UserError(
            f"{folder} is not whole: {_abbreviate(missing)} missing"
            f"{pickled or interrupted or '; download what is missing'}"
        )
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safetensors.safe_open(path, "pt") as reader:
                files |= dict.fromkeys(reader.keys(), path)
        except safetensors.SafetensorError as error:
            raise UserError(f"{path} cannot be read ({error}); download it again") from None
    return files


def _abbreviate(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def config_fragment(checkpoint: DenseCheckpoint) -> str:
    """YAML of the `model` and `init` sections; model.attention is softmax, which gives the dense model's outputs."""
    folder = checkpoint.folder.resolve()
    lines = [
        f"# {checkpoint.config['model_type']} from {folder}, made by `megakernel import`.",
        f"# Its data: megakernel prepare --source SOURCE --tokenizer {folder} --out DIR",
        *([f"# {dropout}"] if (dropout := unread_dropout(checkpoint.config)) else []),
        yaml_text.write({"model": checkpoint.section, "init": {"from": str(folder)}}),
    ]
    return "\n".join(lines)
