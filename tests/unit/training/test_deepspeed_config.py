from types import SimpleNamespace

import pytest
import torch

from megakernel.config import ConfigError
from megakernel.training.deepspeed_config import check_deepspeed_keys, updates_on_cpu
from megakernel.training.trainer import Trainer

from ..config import trees


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("comms_logger", "hello"),
        ("activation_checkpointing", "hello"),
        ("communication_data_type", "hello"),
        ("zero_optimization", {"overlap_comm": "hello"}),
        ("zero_optimization", {"overlap_com": True}),
    ],
)
def test_invalid_deepspeed_settings_are_refused_by_key(key, value):
    with pytest.raises(ConfigError) as caught:
        check_deepspeed_keys(trees.config(deepspeed={key: value}))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"deepspeed.{key}={value} is not what DeepSpeed reads (")
    assert line.endswith("or remove it")


def test_a_run_with_invalid_deepspeed_settings_writes_no_folder(tmp_path):
    config = trees.config(deepspeed={"comms_logger": "hello"}, run={"root": str(tmp_path)})
    with pytest.raises(ConfigError, match="not what DeepSpeed reads"):
        Trainer(config, mesh=None, providers=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offload", "on_cpu"),
    [(None, False), ({}, False), ({"device": "none"}, False), ({"device": "cpu"}, True)],
)
def test_a_gpu_updates_weights_in_host_memory_only_if_the_optimizer_is_offloaded(offload, on_cpu):
    config = trees.config(deepspeed={"zero_optimization": {"offload_optimizer": offload}})
    assert updates_on_cpu(config, SimpleNamespace(device=torch.device("cuda"))) is on_cpu
