"""Every family meets the bounds that the page of dense families states."""

import pytest

from benchmarks.dense_families import measure
from tests import dense_models
from tests.tiers import tiered


@pytest.mark.parametrize(
    "name", tiered(dense_models.CONFIGS, ["granite", "gemma2", "olmo3, some layers slide"])
)
def test_a_family_is_imported_and_exported_as_in_transformers(name, tmp_path):
    found = measure(name, tmp_path)
    assert found.float32 < 2e-5
    # Both implementations round the same sums in different ways: their distances to float32 are about equal.
    assert found.rounding < 1.2 * found.transformers_rounding
    assert found.export_is_equal
