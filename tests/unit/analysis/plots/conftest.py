import pytest

from megakernel.config import Parallel
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.processes import ProcessEnvironment


@pytest.fixture(scope="package", autouse=True)
def cpu():
    return prepare_device("cpu", 0)


@pytest.fixture(scope="package")
def mesh(cpu):
    """With process groups, which the head's cross entropy asks for."""
    mesh = Mesh.create(Parallel(), ProcessEnvironment(), cpu)
    yield mesh
    mesh.destroy()
