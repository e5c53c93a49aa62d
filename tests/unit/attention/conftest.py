from tests.unit.ops.conftest import short_groups, small_chunks

__all__ = ["short_groups", "small_chunks"]
