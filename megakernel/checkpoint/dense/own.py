"""Exports of our own `model_type`: their config.json as our model section, their tensors as ours, both ways.

Names are those of the classes in `checkpoint/modeling`. Exports of earlier versions hold our section and our names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megakernel.config import Attention, Model, UserError, validate_section
from megakernel.config.algebra import SimpleGla

from .parts import GroupedHeads, Part

OWN = "megakernel"
"""`model_type` that `megakernel export` writes if no family of `transformers` has all of the model's parts."""

OLD_PREFIX = "model."
"""Prefix of our names in exports of earlier versions, which have a `model` section in config.json."""

_RENAMED = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "embedding_init_std": "embedding_initializer_range",
    "rope_base": "rotary_base",
    "rope_scaling": "rotary_scaling",
    "rope_pattern": "rotary_pattern",
    "local_rope": "rotary_local",
}
"""Key of our model section -> key of config.json; the others have the same name in both."""

_LEFT_OUT = ("kind", "classifier", "vocab_multiple")

KIND = "kind"
"""Key of a mechanism in config.json that says which class implements it; it follows from the others."""

PACKAGE = "package"
"""`KIND` of mechanisms that only this package implements."""

_MAPS = ("elu", "relu", "identity", "hedgehog", "favor", "rff")


def kind_of(attention: Attention) -> str:
    """The class of `checkpoint/modeling` that implements a mechanism, or `PACKAGE`."""
    simple_map = attention.feature_map is None or attention.feature_map.name in _MAPS
    if attention.mixture is not None or not simple_map or attention.similarity == "gaussian":
        return PACKAGE
    layer = attention.spec.causal_layer or attention.spec.layer
    if layer == "attention.flurka.FlurkaAttention" and attention.far_decay != "none":
        return "decaying_flurka"
    return {
        "attention.softmax.SoftmaxAttention": "softmax",
        "attention.softmax.LocalAttention": "local",
        "attention.kernel.KernelAttention": "kernel",
        "attention.flurka.FlurkaAttention": "flurka",
        "attention.simple_gla.SimpleGlaAttention": "gated_state",
        "attention.gated_delta.GatedDeltaAttention": "gated_state",
    }.get(layer, PACKAGE)


def package_mechanisms(model: Model) -> list[str]:
    """The mechanisms of a model's layers that an exported file imports from this package; empty: none."""
    names = []
    for attention in model.attentions:
        if kind_of(attention) == PACKAGE:
            name = attention.spec.name
            name += f" ({attention.feature_map.name})" if attention.feature_map is not None else ""
            names.append(name + (" with mixture keys" if attention.mixture is not None else ""))
    return list(dict.fromkeys(names))


def imported_mechanisms(config: Mapping[str, Any]) -> list[str]:
    """`package_mechanisms` of the model of a config.json."""
    return package_mechanisms(validate_section(Model, own_section(config, "config.json"), "config.json"))


def own_config(model: Model) -> dict[str, Any]:
    """The keys of config.json for a model section, with its derived sizes."""
    sizes = {
        "num_kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "mlp_bias": model.has_mlp_bias,
    }
    keys = model.model_dump(mode="json", exclude_none=True) | sizes
    if not model.dropout.any:
        del keys["dropout"]
    keys["attention"] = _with_kind(model.attention)
    if model.attention_pattern is not None:
        keys["attention_pattern"] = [
            entry if isinstance(entry, str) else _with_kind(entry) for entry in model.attention_pattern
        ]
    return {_RENAMED.get(key, key): value for key, value in keys.items() if key not in _LEFT_OUT}


def own_section(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Our model section of config.json. UserError: keys that every export has are missing."""
    old = config.get("model")
    wanted = ("vocab_size",) if isinstance(old, dict) else ("vocab_size", "hidden_size", "num_hidden_layers")
    for key in wanted:
        if not isinstance(config.get(key), int):
            raise UserError(f"{source} has no `{key}`; export the run again with `megakernel export`")
    if isinstance(old, dict):
        return old | {"vocab_size": config["vocab_size"]}
    if not isinstance(config.get("attention"), dict):
        raise UserError(f"{source} has no `attention`; export the run again with `megakernel export`")
    known = {_RENAMED.get(name, name): name for name in Model.model_fields if name not in _LEFT_OUT}
    section = {known[key]: value for key, value in config.items() if key in known and value is not None}
    section["attention"] = _without_kind(section["attention"])
    if "attention_pattern" in section:
        section["attention_pattern"] = [_without_kind(entry) for entry in section["attention_pattern"]]
    return section


def _with_kind(attention: Attention) -> dict[str, Any]:
    keys = attention.model_dump(mode="json", exclude_none=True)
    if attention.mechanism == "simple_gla" and attention.simple_gla is None:
        keys["simple_gla"] = SimpleGla().model_dump(mode="json")
    return {KIND: kind_of(attention), **keys}


def _without_kind(entry: Any) -> Any:
    return {key: value for key, value in entry.items() if key != KIND} if isinstance(entry, dict) else entry


@dataclass(frozen=True, kw_only=True)
class _ByKeyHead(Part):
    """A tensor whose rows are grouped by key head, [rows of the first of hf_names | rows of the second | ...]."""

    kv_heads: int
    per_key_head: tuple[int, ...]
    """Rows of each of hf_names per key head."""

    flattened: int = 0
    """Dimensions after the rows that are rows of the checkpoint's tensors."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The model's tensor from the checkpoint's."""
        rows = [
            x.unflatten(0, (self.kv_heads, count, *([-1] * self.flattened)))
            for x, count in zip(tensors, self.per_key_head)
        ]
        joined = torch.cat(rows, 1)
        return joined if self.flattened else joined.flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The checkpoint's tensors from the model's; the inverse of `join`."""
        rows = tensor if self.flattened else tensor.unflatten(0, (self.kv_heads, -1))
        return [x.flatten(0, 1 + self.flattened) for x in rows.split(self.per_key_head, 1)]


_MODULES = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "self_attention.output": "self_attn.o_proj",
    "self_attention.query_norm": "self_attn.q_norm",
    "self_attention.key_norm": "self_attn.k_norm",
    "self_attention.output_norm": "self_attn.o_norm",
    "self_attention.output_gate": "self_attn.g_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
"""Module of a layer -> its name in exports."""


def own_parts(names: Iterable[str], model: Model) -> dict[str, Part]:
    """Our names of a model's tensors -> the export's tensors that make them up."""
    return {name: _part(name, model) for name in names}


def _part(name: str, model: Model) -> Part:
    number, _, rest = name.partition(".")
    module, _, kind = rest.rpartition(".")
    if rest.endswith("tokens.weight"):
        return Part(("model.embed_tokens.weight",))
    if module == "linear":
        return Part(("lm_head.weight",))
    layer = int(number) - model.first_layer
    if layer < 0:
        return Part(("model.embed_positions.weight",))
    if layer == model.num_layers:
        return Part((f"model.norm.{kind}",))
    prefix = f"model.layers.{layer}."
    if module in _MODULES:
        return Part((f"{prefix}{_MODULES[module]}.{kind}",))
    if module == "mlp.linear_fc1":
        halves = ("gate_proj", "up_proj") if model.is_mlp_gated else ("up_proj",)
        return Part(tuple(f"{prefix}mlp.{half}.{kind}" for half in halves))
    attention = model.layer_attention(layer)
    queries, keys = model.num_heads // model.kv_heads, attention.keys_per_head

    def of_qkv(suffix: str) -> tuple[str, ...]:
        return tuple(f"{prefix}self_attn.{part}_{suffix}" for part in "qkv")

    if module == "self_attention.qkv":
        return GroupedHeads(
            of_qkv(f"proj.{kind}"),
            query_heads=model.num_heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_size,
            keys_per_head=keys,
        )
    if module == "self_attention.short_convolution":
        return _ByKeyHead(
            of_qkv("conv1d.weight"), kv_heads=model.kv_heads, per_key_head=(queries, keys, 1), flattened=1
        )
    if module == "self_attention.further":
        wanted = zip("ab", has_decay_and_strength(attention))
        logits = tuple(f"{prefix}self_attn.{part}_proj.weight" for part, is_there in wanted if is_there)
        return _ByKeyHead(logits, kv_heads=model.kv_heads, per_key_head=(1,) * len(logits))
    assert module.startswith("self_attention.core"), name
    return Part((f"{prefix}self_attn.{rest.removeprefix('self_attention.')}",))


def has_decay_and_strength(attention: Attention) -> tuple[bool, bool]:
    """Whether a layer projects the logit of a decay, and of the strength with which a token writes."""
    writes = attention.mechanism == "simple_gla" and (attention.simple_gla or SimpleGla()).update == "delta"
    return attention.spec.further - writes > 0, writes
