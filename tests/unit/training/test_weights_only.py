"""Tensor files from an untrusted source."""

import os
import subprocess
import sys

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from megakernel.checkpoint import weights_only
from megakernel.config import UserError
from tests.hostile import Harm, flip, plant, plant_pickle

DEEPSPEED_STATE = {
    "loss_scaler": LossScaler(2.0),
    "zero_stage": ZeroStageEnum.gradients,
    "param_slice_mappings": [{"weight": fragment_address(numel=3, start=4)}],
    "weight": torch.arange(1000.0),
}


def test_deepspeed_checkpoints_load_without_importing_deepspeed(tmp_path):
    torch.save(DEEPSPEED_STATE, tmp_path / "file.pt")
    script = f"""
import sys
from pathlib import Path
from megakernel.checkpoint import weights_only
file = Path({str(tmp_path / "file.pt")!r})
weights_only.check(file)
found = weights_only.load(file)
place = found["param_slice_mappings"][0]["weight"]
assert (found["zero_stage"], place.start, place.numel) == (2, 4, 3), found
assert found["weight"].sum() == 499500
assert "deepspeed" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


class ByName:
    """Is pickled as Python 3.11.0 to 3.11.3, which Debian 12 has, pickle a member of an enumeration."""

    def __init__(self, owner: type, name: str):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_load_as_any_python_pickles_them(tmp_path):
    torch.save(DEEPSPEED_STATE | {"zero_stage": ByName(ZeroStageEnum, "gradients")}, tmp_path / "file.pt")
    weights_only.check(tmp_path / "file.pt")
    assert weights_only.load(tmp_path / "file.pt")["zero_stage"] == 2
    with weights_only.enforce():
        found = torch.load(tmp_path / "file.pt", weights_only=False)["zero_stage"]
    assert found is ZeroStageEnum.gradients


@pytest.mark.parametrize(("owner", "name"), [(LossScaler, "__init__"), (fragment_address, "start")])
def test_no_other_attribute_is_read(owner, name, tmp_path):
    torch.save({"zero_stage": ByName(owner, name)}, tmp_path / "file.pt")
    with pytest.raises(UserError, match="is code, not a tensor") as refused:
        weights_only.load(tmp_path / "file.pt")
    assert len(str(refused.value).splitlines()) == 1
    with weights_only.enforce(), pytest.raises(Exception, match="is code, not a tensor"):
        torch.load(tmp_path / "file.pt", weights_only=False)


@pytest.mark.parametrize(
    "plant_code", [plant, plant_pickle, lambda file, marker: torch.save(Harm(marker), file)]
)
def test_code_in_a_file_is_named_and_not_executed(plant_code, tmp_path):
    plant_code(tmp_path / "file.pt", tmp_path / "harm")
    for read in (weights_only.load, weights_only.check):
        with pytest.raises(UserError, match=r"mkdir|damaged") as refused:
            read(tmp_path / "file.pt")
        assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "harm").exists()


def test_enforce_blocks_code_even_if_weights_only_is_off(tmp_path):
    torch.save(DEEPSPEED_STATE, tmp_path / "good.pt")
    plant(tmp_path / "bad.pt", tmp_path / "harm")
    with weights_only.enforce():
        found = torch.load(tmp_path / "good.pt", weights_only=False)
        assert isinstance(found["loss_scaler"], LossScaler)
        with pytest.raises(Exception, match="mkdir"):
            torch.load(tmp_path / "bad.pt", weights_only=False)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, None])
def test_a_damaged_tensor_file_is_refused_in_one_line(content, tmp_path):
    file = tmp_path / "file.pt"
    torch.save(DEEPSPEED_STATE, file)
    flip(file, 0.0) if content is None else file.write_bytes(content)
    for read in (weights_only.load, weights_only.check):
        with pytest.raises(UserError, match="damaged") as refused:
            read(file)
        assert len(str(refused.value).splitlines()) == 1
