"""The vocabulary of a run as a source of weights."""

import pytest

from megakernel.checkpoint.manifest import SavedProgress, write_manifest
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import UserError, to_yaml

from ..config import trees


@pytest.mark.parametrize(
    ("vocab_size", "mismatches"),
    [(300, ["its vocabulary has 300 ids and the model's 310"]), (310, []), (None, [])],
)
def test_a_run_of_another_vocabulary_mismatches_even_at_equal_padded_size(vocab_size, mismatches, tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(to_yaml(trees.config(model={"vocab_size": vocab_size})))
    write_manifest(checkpoint, SavedProgress(1, 1, 1, {}, {}), {})
    assert WeightSource.find("objective.teacher", tmp_path).vocab_size_mismatch(310) == mismatches


def test_a_file_in_place_of_a_folder_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match=r"is no run, no good checkpoint .*; give a folder such as runs/NAME"):
        WeightSource.find("init.from", tmp_path / "model.safetensors")
