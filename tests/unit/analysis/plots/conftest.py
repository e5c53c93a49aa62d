import pytest

from megakernel.config import Parallel
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.processes import ProcessEnvironment


@pytest.fixture(scope="package", autouse=True)
def cpu():
    return prepare_device("cpu", 0)


@pytest.fixture(scope="package")
def mesh(cpu):
    """A mesh with process groups, which the cross entropy of the head needs."""
    mesh = Mesh.create(Parallel(), ProcessEnvironment(), cpu)
    yield mesh
    mesh.destroy()
