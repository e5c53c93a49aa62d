import os

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports triton: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def same_numbers():
    """What a test draws without a generator of its own does not depend on the tests before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    """Tests of a GPU need one; without it they say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared corpus: part of the standard library's source files."""
    from launch.cli import main

    folder = tmp_path_factory.mktemp("data") / "stdlib"
    command = f"prepare --source stdlib --tokenizer byte --out {folder} --max-documents 60 --validation-fraction 0.1"
    assert main(command.split()) == 0
    return folder
