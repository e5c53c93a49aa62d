"""A library in place of that of NVIDIA's driver, whose one GPU a test sets; nvidia-ml-py itself is the real one."""

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
UUID = "00000000-1111-2222-3333-444444444444"


class FakeNvml:
    """Sets the variables `fake_NAME` of the library."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._before: dict[str, int] = {}

    def set(self, kind: Any = ctypes.c_uint, **values: int) -> None:
        for name, value in values.items():
            variable = kind.in_dll(self._library, f"fake_{name}")
            self._before.setdefault(name, variable.value)
            variable.value = value

    def set_wide(self, **values: int) -> None:
        """The same for variables of 64 bits."""
        self.set(ctypes.c_ulonglong, **values)

    def xid(self, *numbers: int) -> None:
        """Events in the driver's queue."""
        events = (ctypes.c_ulonglong * 8).in_dll(self._library, "fake_xids")
        for place, number in enumerate(reversed(numbers)):
            events[place] = number
        self.set(xid_count=len(numbers))


@contextlib.contextmanager
def fake_nvml(folder: Path) -> Iterator[FakeNvml]:
    """The library, loaded into this process under the driver's name while the block runs."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: pip install -e '.[gpu]'")
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    built = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", SOURCE, "-o", built]
    subprocess.run([*command, "-Wl,-soname,libnvidia-ml.so.1"], check=True)
    before = pynvml.nvmlLib
    pynvml.nvmlLib = pynvml._nvmlGetFunctionPointer_cache.clear()  # nothing is loaded
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(folder / name)))
        yield FakeNvml(ctypes.CDLL(str(built)))
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = before
