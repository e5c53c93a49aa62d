"""Which implementation of an op runs."""

import inspect
import os
import re
import warnings
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch
from torch import Tensor

from megakernel import ops
from megakernel.ops import dispatch
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.kernels import assembler

OPS = [
    (module, name)
    for found in iter_modules(ops.__path__)
    if hasattr(module := import_module(f"megakernel.ops.{found.name}"), "IMPLEMENTATIONS")
    for name, function in vars(module).items()
    if "backend:" in (getattr(function, "__doc__", None) or "")
]


@pytest.mark.parametrize(("module", "name"), OPS, ids=[name for _, name in OPS])
def test_an_op_names_its_backends(module, name):
    (listed,) = re.findall(r"backend: ([a-z, ]+?)[.;]", getattr(module, name).__doc__)
    assert set(re.split(", | or ", listed)) == set(module.IMPLEMENTATIONS)


@pytest.mark.parametrize(
    "module", dict.fromkeys(module for module, _ in OPS), ids=lambda module: module.__name__
)
def test_every_op_has_a_reference(module):
    assert "reference" in module.IMPLEMENTATIONS


class OnGpu(Tensor):
    """A CPU tensor that claims to be on a GPU, which is what the dispatcher checks."""

    is_cuda = True


def attend(width: int, dtype: torch.dtype, backend: str | None) -> Tensor:
    q = torch.linspace(-1, 1, 8 * width).view(1, 1, 8, width).to(dtype).as_subclass(OnGpu)
    return kernel_attention(q, q, q, feature_map="elu", backend=backend)


def test_kernels_that_an_old_ptxas_miscompiles_do_not_run(monkeypatch):
    monkeypatch.setattr(assembler, "RELEASE", (12, 8))
    dispatch._warn_once.cache_clear()
    reason = (
        "ptxas 12.8 miscompiles matrix products of compute capability 9.0; expected at least 13.1: "
        "pip install 'megakernel[gpu]', or set TRITON_PTXAS_PATH"
    )
    with pytest.warns(
        RuntimeWarning, match=re.escape(f"kernel_attention runs without its kernels: {reason}")
    ):
        out = attend(16, torch.bfloat16, None)
    assert torch.equal(out, attend(16, torch.bfloat16, "chunked"))
    with pytest.raises(ValueError, match=re.escape(f"backend='triton': {reason}; take backend='chunked'")):
        attend(16, torch.bfloat16, "triton")
    assert [assembler.problem(capability) for capability in (80, 100, 120)] == [None] * 3


@pytest.mark.parametrize(
    ("cuda", "gpu", "chosen", "expected"),
    [
        ("13.0", (9, 0), None, "the package's"),
        (None, None, None, "the package's"),
        ("13.0", (8, 0), None, None),
        ("12.8", (9, 0), None, None),
        ("13.0", (9, 0), "/opt/ptxas", "/opt/ptxas"),
    ],
)
def test_the_packages_ptxas_is_used_on_hopper_where_drivers_load_its_code(
    cuda, gpu, chosen, expected, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    monkeypatch.delenv(assembler.VARIABLE, raising=False)
    if chosen:
        monkeypatch.setenv(assembler.VARIABLE, chosen)
    assembler.use_newer()
    found = os.environ.get(assembler.VARIABLE)
    assert found == (str(assembler._of_package()) if expected == "the package's" else expected)


def test_the_required_ptxas_is_right_for_hopper():
    assert assembler.release_in_use() >= assembler.FIRST_RIGHT


def attend_landmarks(width: int, dtype: torch.dtype, backend: str | None) -> Tensor:
    q = torch.linspace(-1, 1, 8 * width).view(1, 1, 8, width).to(dtype).as_subclass(OnGpu)
    pool = torch.full((2, 4), 0.25)
    gate = torch.zeros(1, 1, 8)
    options = {"pool_keys": pool, "pool_values": pool, "gate": gate, "backend": backend}
    return flurka_attention(q, q, q, feature_map="elu", **options)[0]


@pytest.mark.parametrize(
    ("run", "width", "dtype", "warning"),
    [
        (attend, 136, torch.bfloat16, "kernel_attention runs without its kernels: q has width 136"),
        (attend_landmarks, 32, torch.float32, "flurka_attention runs without its kernels: q has width 32"),
    ],
)
def test_widths_that_kernels_cannot_take_run_chunked_with_one_warning(run, width, dtype, warning):
    dispatch._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outputs = [run(width, dtype, None) for _ in range(2)]
    assert all(torch.equal(one, run(width, dtype, "chunked")) for one in outputs)
    assert [str(one.message).startswith(warning) for one in seen] == [True]


def test_packages_of_ops_are_not_hidden_by_functions_of_their_names():
    """`import a.b.c as x` takes b from the attributes of a."""
    import megakernel.ops.flurka_attention.options as options
    import megakernel.ops.kernels.launcher as launcher

    assert inspect.ismodule(options)
    assert inspect.ismodule(launcher)
    for module in iter_modules(ops.__path__):
        assert inspect.ismodule(import_module(f"megakernel.ops.{module.name}"))
        assert inspect.ismodule(getattr(ops, module.name)), module.name
