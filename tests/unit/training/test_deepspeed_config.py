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


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        (
            {"zero_optimisation": {"stage": 2}},
            "deepspeed.zero_optimisation={'stage': 2} is no key of DeepSpeed; ",
        ),
        ({"overlap_comm": True}, "deepspeed.overlap_comm=True is no key of DeepSpeed; "),
        (
            {"data_types": {"grad_accum_dtyp": "fp32"}},
            "deepspeed.data_types.grad_accum_dtyp=fp32 is no key of ",
        ),
        ({"aio": {"block_siz": 1}}, "deepspeed.aio"),
        ({"activation_checkpointing": {"partition_activation": True}}, "deepspeed.activation_checkpointing"),
        ({"checkpoint": {"parallel_writ": {}}}, "deepspeed.checkpoint.parallel_writ={} is no key of "),
    ],
)
def test_a_key_that_deepspeed_would_not_look_at_is_refused(tree, line):
    with pytest.raises(ConfigError) as caught:
        check_deepspeed_keys(trees.config(deepspeed=tree))
    (text,) = str(caught.value).splitlines()
    assert text.startswith(line)


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"checkpoint": {"writer": {"type": "fast", "decoupled": True}}}, "checkpoint.writer"),
        ({"datastates_ckpt": {"enabled": True}}, "datastates_ckpt"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal"),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            "zero_optimization.round_robin_gradients",
        ),
        (
            {"zero_optimization": {"load_from_fp32_weights": False}},
            "zero_optimization.load_from_fp32_weights",
        ),
    ],
)
def test_keys_that_make_other_checkpoints_are_refused(tree, key):
    with pytest.raises(ConfigError, match=rf"deepspeed\.{key}=.*; remove it"):
        check_deepspeed_keys(trees.config(deepspeed=tree))


def test_the_key_that_was_meant_comes_first_in_the_remedy():
    with pytest.raises(ConfigError, match=r"did you mean zero_optimization,"):
        check_deepspeed_keys(trees.config(deepspeed={"zero_optimisation": {"stage": 2}}))


@pytest.mark.parametrize(
    "tree",
    [
        {"comms_logger": {"enabled": True}},
        {"flops_profiler": {"enabled": True}},
        {"wall_clock_breakdown": True},
        {"zero_optimization": {"overlap_comm": True, "offload_optimizer": {"device": "cpu"}}},
        {"aio": {"block_size": 1048576}},
        {"activation_checkpointing": {"partition_activations": False}},
        {
            "communication_data_type": "fp32",
            "prescale_gradients": False,
            "zero_force_ds_cpu_optimizer": False,
        },
        {"checkpoint": {"tag_validation": "Warn"}},
        {"csv_monitor": {"enabled": False}},
    ],
)
def test_keys_of_deepspeed_are_accepted(tree):
    check_deepspeed_keys(trees.config(deepspeed=tree))


def test_a_run_with_invalid_deepspeed_settings_writes_no_folder(tmp_path):
    config = trees.config(deepspeed={"comms_logger": "hello"}, run={"root": str(tmp_path)})
    with pytest.raises(ConfigError, match="not what DeepSpeed reads"):
        Trainer(config, mesh=None, providers=None)
    assert not list(tmp_path.iterdir())
