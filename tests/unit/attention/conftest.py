from tests.unit.ops.conftest import small_chunks

__all__ = ["small_chunks"]
