"""The file that an exported model carries: `MegakernelForCausalLM` and its configuration, out of this package.

Nothing of it is written twice: definitions are followed from the classes that `transformers` asks for, branches of
other processes and other devices leave, and the text of what is left stands as it does in the package. The same sources
and mechanisms give the same bytes.
"""

from functools import cache
from typing import Any

from megakernel import __version__
from megakernel.config import Model
from megakernel.config.attention import AROUND
from megakernel.config.mechanisms import MECHANISMS

from .flattening import Flattening
from .folding import Known, fold
from .sources import Definition, Source

CODE_FILE = "modeling_megakernel.py"
"""What `trust_remote_code=True` runs."""

NEEDED = {"torch": "2.11", "transformers": "5.17"}
"""Oldest versions, those of setup.cfg."""

_HEADER = '''# SPDX-License-Identifier: Apache-2.0
# Made by megakernel {version} out of its sources; a change of this file is lost with the next export.
"""A causal language model for `transformers`, in torch alone. Mechanisms of its layers: {mechanisms}.

It is taken from the sources of Megakernel, module by module; the comments between the parts name the files. Load it
with AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True).
"""

import torch
import transformers
from packaging.version import Version

for _library, _oldest in ((torch, "{torch}"), (transformers, "{transformers}")):
    if Version(_library.__version__) < Version(_oldest):
        raise ImportError(
            f"this model needs {{_library.__name__}}>={{_oldest}} and finds {{_library.__version__}}; "
            f"pip install -U '{{_library.__name__}}>={{_oldest}}'"
        )
'''

_HERE = "megakernel.checkpoint.standalone"

_ROOTS = (
    Definition("megakernel.checkpoint.pretrained_config", "MegakernelConfig"),
    Definition("megakernel.checkpoint.pretrained.model", "MegakernelForCausalLM"),
)
_WHOLE = ("MegakernelConfig", "MegakernelForCausalLM", "Places", "StateCache")

_STAND_INS = (
    Definition("megakernel.config.section", "Section"),
    Definition("megakernel.config.validation", "validate_section"),
    Definition("megakernel.parallel.axis", "OneProcess"),
    Definition("megakernel.parallel.tensor", "head_shard"),
    Definition("megakernel.parallel.tensor", "replicated"),
    Definition("megakernel.ops.dispatch", "choose"),
    Definition("megakernel.model.head", "mean_loss"),
    Definition(f"{_HERE}.code", "code_of"),
)
"""What is replaced by what `stand_ins.py` has under the same name."""

_LAYERS = f"{_HERE}.layers"

_VALUES: dict[str, Any] = {
    # One process holds the model.
    "isinstance(settings.mesh, OneProcess)": True,
    "tp.size": 1,
    "sequence_parallel": False,
    "cp_shard.size": 1,
    "cp_shard.rank": 0,
    "self._goes_round(shard)": False,
    "self.scatter_group": None,
    # It continues text, and was checked when it was exported.
    "self.causal": True,
    "model.is_causal": True,
    "model.classifier": None,
    "isinstance(attention, Attention)": True,
    "form.mixes_future_tokens": None,
    "form.looks_back_only": None,
    "list(form.problems_at(settings.head_dim))": [],
    "self.core.compresses_input": False,
    # LoRA is PEFT's there, and up-training is over.
    "settings.lora": None,
    **{f"self.{of}_update": None for of in ("query", "key", "value", "output", "gate", "up", "down")},
    "self.near_dropout": None,
}


def code_of(model: Model) -> str:
    """The text of CODE_FILE for a causal model, with the mechanisms of its layers and no others."""
    forms = model.attentions
    makers = frozenset(next(make.__name__ for fits, make in MECHANISMS if fits(form)) for form in forms)
    layers = frozenset(form.spec.causal_layer or form.spec.layer for form in forms)
    maps = frozenset(
        form.feature_map.name.partition("_")[0] for form in forms if form.feature_map is not None
    )
    absent = dict.fromkeys(AROUND) | {"far_decay": "none"}
    unused = frozenset(
        (key, none)
        for key, none in absent.items()
        if all(getattr(form, key) in (none, False) for form in forms)
    )
    return _code(makers, layers, maps, unused)


@cache
def _code(
    makers: frozenset[str], layers: frozenset[str], maps: frozenset[str], unused: frozenset[tuple[str, Any]]
) -> str:
    """unused: keys of a mechanism that no layer sets, and what they are then."""
    known = Known(
        values=_VALUES | {f"{owner}.{key}": none for owner in ("form", "self") for key, none in unused},
        entries=("reference", "triton", "liger"),
        tables={"MECHANISMS": makers, "_KINDS": maps},
        absent=Definition(f"{_HERE}.stand_ins", "absent"),
        keywords={
            "Mechanism": (
                "exchanges",
                "causal_exchanges",
                "flops",
                "state_sizes",
                "block_size",
                "mixes_future_tokens",
                "mixes_documents",
                "looks_back_only",
                "changes_constants",
                "weighs_every_pair",
                "is_gated",
            ),
            "ModelSettings": ("lora",),
        },
        statements=("mark_head_parameters",),
        methods=("problems", "problems_at"),
        arguments=("Annotated", "Field"),
    )
    stand_ins = {left: Definition(f"{_HERE}.stand_ins", left.name) for left in _STAND_INS}
    stand_ins[Definition("megakernel.attention.build", "layer_class")] = Definition(_LAYERS, "layer_class")
    file = Flattening(lambda source: fold(source, known), stand_ins, _WHOLE, tuple(NEEDED))
    file.add(Source(_LAYERS, _layer_table(sorted(layers)).encode()))
    file.reach(_ROOTS)
    named = ", ".join(layer.partition(".")[0] for layer in sorted(layers)).replace("_", " ")
    return file.text(_HEADER.format(version=__version__, mechanisms=named, **NEEDED))


_LAYER_TABLE = '''{imports}

LAYERS = {{{rows}}}


def layer_class(place: str) -> type:
    """The class of a layer."""
    return LAYERS[place]
'''


def _layer_table(layers: list[str]) -> str:
    places = [layer.split(".") for layer in layers]
    imports = (f"from megakernel.attention.{module} import {name}" for module, name in places)
    rows = (f'"{module}.{name}": {name}' for module, name in places)
    return _LAYER_TABLE.format(imports="\n".join(imports), rows=", ".join(rows))
