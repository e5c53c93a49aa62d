"""Packages that only some commands need, and the line that says how to install one that is missing.

The base installation has what `pretrain` and `generate` need on one machine's CPU; `setup.cfg` has the same extras.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from .errors import UserError


@dataclass(frozen=True)
class Extra:
    """One extra of the package."""

    use: str
    """What it is for, for `doctor`."""

    packages: Mapping[str, str]
    """Module -> the package that brings it."""


EXTRAS: Mapping[str, Extra] = {
    "gpu": Extra(
        "kernels on GPUs; the newer assembler of Hopper; fused norms, SwiGLU, RoPE and loss; clocks, power, ECC",
        {
            "triton": "triton",
            "liger_kernel": "liger-kernel",
            "fla": "flash-linear-attention",
            "pynvml": "nvidia-ml-py",
        },
    ),
    "fp8": Extra("training.fp8", {"torchao": "torchao"}),
    "train": Extra("text of the hub, Parquet, Arrow, zstd", {"datasets": "datasets", "pyarrow": "pyarrow"}),
    "hf": Extra(
        "tokenizers other than byte and pixels; export and import",
        {"transformers": "transformers", "tokenizers": "transformers", "huggingface_hub": "transformers"},
    ),
    "plot": Extra(
        "analyze, plots in TensorBoard, the page of an up-training, monitor --curve",
        {"matplotlib": "matplotlib", "markdown": "markdown", "plotext": "plotext"},
    ),
    "slurm": Extra("submit, sweep, resume", {"submitit": "submitit"}),
    "serve": Extra("serve", {"fastapi": "fastapi", "uvicorn": "uvicorn", "starlette": "fastapi"}),
    "shell": Extra("--print-completion of bash and zsh", {"shtab": "shtab"}),
    "wandb": Extra("logging.wandb", {"wandb": "wandb"}),
    "trackio": Extra("logging.trackio", {"trackio": "trackio"}),
    "eval": Extra(
        "lm-evaluation-harness: evaluate --task lm_eval:NAME, and exported models; BLEU: --task translation",
        {"lm_eval": "lm-eval", "sacrebleu": "sacrebleu"},
    ),
}
"""Extra -> what it brings, as `pip install 'megakernel[NAME]'`."""

_EXTRA_OF = {module: name for name, extra in EXTRAS.items() for module in extra.packages}


def install(extra: str) -> str:
    """The pip command that adds an extra to this installation."""
    try:
        version("megakernel")
    except PackageNotFoundError:
        # A checkout on the import path; the public index has another project of this name.
        return f"pip install -e '.[{extra}]' -c constraints.txt"
    return f"pip install 'megakernel[{extra}]'"


def lacking(what: str, *modules: str) -> str | None:
    """`WHAT needs PACKAGE; pip install ...` if one of these modules, all of one extra, is missing."""
    return _line(what, [module for module in modules if find_spec(module) is None])


def need(what: str, *modules: str) -> None:
    """Raise UserError with the line of `lacking`, before anything is imported or written."""
    if line := lacking(what, *modules):
        raise UserError(line)


def explained(what: str, error: ModuleNotFoundError) -> str | None:
    """The same line for a failed import; None if the module belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    return _line(what, [module] if module in _EXTRA_OF else [])


def _line(what: str, missing: list[str]) -> str | None:
    if not missing:
        return None
    extra = _EXTRA_OF[missing[0]]
    packages = dict.fromkeys(EXTRAS[extra].packages[module] for module in missing)
    return f"{what} needs {' and '.join(packages)}; {install(extra)}"
