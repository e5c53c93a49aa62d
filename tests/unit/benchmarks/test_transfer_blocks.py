"""The table of what attention transfer in blocks takes, on a model of two small layers."""

import pytest

from benchmarks import transfer_blocks


@pytest.mark.second
def test_a_row_is_measured_in_a_process_of_its_own(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(transfer_blocks, "HIDDEN", 64)
    transfer_blocks.dense(tmp_path / "dense", 2)
    file = transfer_blocks.written(tmp_path, corpus)
    blocks, whole = (transfer_blocks.in_a_process(file, layers) for layers in (1, None))
    training = transfer_blocks.TRAINING
    tokens = training["steps"] * training["global_batch_size"] * training["seq_len"]
    assert (blocks["states"], whole["states"]) == (tokens * 64 * 4, 0)
    assert blocks["resident"] > 0
    assert whole["resident"] > 0
