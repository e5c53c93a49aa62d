from tests.unit.analysis.plots.conftest import cpu, mesh
from tests.unit.attention.conftest import each_backend

__all__ = ["cpu", "each_backend", "mesh"]
