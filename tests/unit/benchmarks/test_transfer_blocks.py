"""The memory of attention transfer in blocks, measured on two small layers."""

import pytest

from benchmarks import transfer_blocks


@pytest.mark.second
def test_a_row_is_measured_in_a_separate_process(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(transfer_blocks, "HIDDEN", 64)
    transfer_blocks.save_dense(tmp_path / "dense", 2)
    file = transfer_blocks.write_config(tmp_path, corpus)
    blocks, whole = (transfer_blocks.run_in_process(file, layers) for layers in (1, None))
    training = transfer_blocks.TRAINING
    tokens = training["steps"] * training["global_batch_size"] * training["seq_len"]
    assert (blocks["states"], whole["states"]) == (tokens * 64 * 4, 0)
    assert blocks["resident"] > 0
    assert whole["resident"] > 0
