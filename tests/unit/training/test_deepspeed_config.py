import pytest

from megakernel.config import ConfigError
from megakernel.training.deepspeed_config import check_deepspeed_keys
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
