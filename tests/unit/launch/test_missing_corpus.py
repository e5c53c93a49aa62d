"""Commands on corpora that do not exist."""

import pytest

from ..config import trees


@pytest.mark.parametrize("processes", [1, 2])
def test_a_corpus_that_is_not_there_is_refused_before_a_run_folder_is_made(
    processes, tmp_path, monkeypatch, refused
):
    monkeypatch.chdir(tmp_path)
    config = trees.file(tmp_path, training={"steps": 1, "seq_len": 64, "global_batch_size": 8})
    assert "data.train=data/x does not exist" in refused("pretrain", config, "--nproc", processes)
    (tmp_path / "data/x").mkdir(parents=True)
    assert "data.train=data/x " in refused("pretrain", config, "--nproc", processes)
    assert not (tmp_path / "runs").exists()
