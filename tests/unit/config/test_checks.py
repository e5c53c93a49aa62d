import pytest

from megakernel.config import ConfigError, data_parallel_size

from .trees import config, problems


@pytest.mark.parametrize(
    ("sections", "key", "remedy"),
    [
        ({"parallel": {"tensor": 3}}, "model.num_heads", "set 3 or 6 or change parallel.tensor"),
        ({"parallel": {"tensor": 4}, "model": {"num_heads": 12, "num_kv_heads": 3, "hidden_size": 96}},
         "parallel.tensor", "set 3 or 6"),
        ({"parallel": {"tensor": 4}, "model": {"num_kv_heads": 2, "head_dim": 15, "position": "none"}},
         "parallel.tensor", "set 2"),
        ({"parallel": {"tensor": 4}, "model": {"num_kv_heads": 2, "attention": "flurka_selected"}},
         "parallel.tensor", "set 2 or a divisor of it"),
        ({"parallel": {"tensor": 2}, "model": {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 96}},
         "model.num_kv_heads", "set 2 or 4 or change parallel.tensor"),
        ({"parallel": {"tensor": 4}, "model": {"ffn_hidden_size": 90}}, "model.ffn_hidden_size",
         "set 88 or 92 or change parallel.tensor"),
        ({"parallel": {"tensor": 4}, "model": {"vocab_multiple": 2}}, "model.vocab_multiple",
         "set 4 or change parallel.tensor"),
        ({"parallel": {"pipeline": 5}}, "parallel.pipeline", "set at most 4"),
        ({"model": {"position": "learned", "max_positions": 511}}, "model.max_positions", "set at least 512"),
        ({"parallel": {"zero_stage": 0}, "training": {"dtype": "bfloat16"}}, "parallel.zero_stage",
         "set zero_stage to 1 or training.dtype to float32"),
        ({"parallel": {"softmax_exchange": "ring"}}, "parallel.softmax_exchange",
         "remove it or set context above 1"),
        ({"logging": {"sample_prompt": "x"}, "parallel": {"zero_stage": 3}}, "logging.sample_prompt",
         "remove it; `megakernel generate RUN` takes checkpoints of every layout"),
        ({"logging": {"analysis_every": 5}, "parallel": {"pipeline": 2}}, "logging.analysis_every",
         "remove it; `megakernel analyze RUN` takes checkpoints of every layout"),
        ({"optimizer": {"trained": "lora"}}, "optimizer.trained",
         "set init.from to the model to update, or trained: all"),
        ({"model": {"num_layers": 2, "attention_pattern": ["main", "main", "softmax"]}}, "model.attention_pattern",
         "leave them out, or raise num_layers"),
        ({"model": {"num_layers": 2, "rope_pattern": ["main", "main", "none"]}}, "model.rope_pattern",
         "leave them out, or raise num_layers"),
        ({"logging": {"histograms_every": 5, "tensorboard": False}}, "logging.histograms_every",
         "remove it or set tensorboard: true"),
        ({"training": {"z_loss": 1e-4}, "model": {"kind": "classifier", "classifier": {"num_classes": 2}}},
         "training.z_loss", "remove it"),
        ({"training": {"z_loss": 1e-4}, "objective": {"kind": "distill", "teacher": "x"}}, "training.z_loss",
         "remove it"),
        ({"training": {"z_loss": 1e-4}, "uptrain": {}, "init": {"from": "x"}}, "training.z_loss", "remove it"),
        ({"model": {"dropout": {"residual": 0.1}}, "objective": {"kind": "transfer", "teacher": "x"}}, "model.dropout",
         "remove it"),
        ({"optimizer": {"name": "muon"}, "parallel": {"zero_stage": 3}}, "optimizer.name",
         "set adamw, or zero_stage to at most 2"),
        ({"optimizer": {"name": "muon", "trained": "mechanism"}}, "optimizer.name", "set adamw, or trained: all"),
        ({"optimizer": {"muon_lr": 0.02}}, "optimizer.muon_lr", "remove it or take name: muon"),
        ({"optimizer": {"name": "muon"}, "uptrain": {}, "init": {"from": "x"}}, "optimizer.name", "set adamw"),
        ({"optimizer": {"name": "muon"},
          "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
         "optimizer.name", "set adamw, or remove offload_optimizer"),
    ],
)  # fmt: skip
def test_contradicting_sections_are_refused_with_the_nearest_valid_value(sections, key, remedy):
    assert problems(**sections)[key].remedy == remedy


@pytest.mark.parametrize(
    ("attention", "has_weights"),
    [
        ("softmax", False),
        ({"preset": "softmax", "window": 64}, False),
        ({"preset": "softmax", "short_convolution": 4}, True),
        ({"similarity": "softmax", "mixture": {"kind": "shifted"}}, True),
    ],
)
def test_only_softmax_without_further_weights_leaves_nothing_to_train_or_up_train(attention, has_weights):
    sections = {"model": {"attention": attention}, "init": {"from": "dense"}}
    assert ("optimizer.trained" in problems(optimizer={"trained": "mechanism"}, **sections)) != has_weights
    assert ("uptrain.layers.keep" in problems(uptrain={}, **sections)) != has_weights


@pytest.mark.parametrize("preset", ["local", "selected"])
def test_windows_and_chosen_blocks_are_up_trained_without_a_transfer_stage(preset):
    """Their layers have the dense model's weights and no others."""
    sections = {"model": {"attention": preset}, "init": {"from": "dense"}}
    assert "optimizer.trained" in problems(optimizer={"trained": "mechanism"}, **sections)
    assert "uptrain.transfer" in problems(uptrain={"transfer": {"steps": 1}}, **sections)
    assert not {"uptrain.transfer", "uptrain.layers.keep"} & problems(uptrain={}, **sections).keys()


@pytest.mark.parametrize(
    ("seq_len", "parallel", "attention", "remedy"),
    [
        (510, {"context": 4}, "linear", "set 508 or 512"),
        (520, {"context": 2}, "flurka", "set 512 or 640"),
        (100, {"context": 2}, "flurka", "set 128"),
        (510, {"tensor": 4, "sequence_parallel": True}, "flurka", "set 508 or 512"),
        (128, {"context": 2}, {"preset": "flurka", "near": {"blocks": 2}}, "set 256"),
        (500, {"context": 2}, "local", "set 384 or 512"),
    ],
)
def test_a_sequence_length_that_splits_blocks_is_refused_with_the_nearest_valid_ones(
    seq_len, parallel, attention, remedy
):
    found = problems(parallel=parallel, training={"seq_len": seq_len}, model={"attention": attention})
    assert found["training.seq_len"].remedy == remedy
    for choice in remedy.removeprefix("set ").split(" or "):
        assert not problems(
            parallel=parallel, training={"seq_len": int(choice)}, model={"attention": attention}
        )


def test_without_context_parallelism_any_length_is_valid():
    assert not problems(training={"seq_len": 511})


@pytest.mark.parametrize(
    "attention", [{"attention": "softmax"}, {"attention_pattern": ["main", "softmax"]}], ids=str
)
def test_softmax_needs_heads_that_divide_over_context_ranks_only_to_exchange_heads(attention):
    model = {"attention": "flurka", **attention}
    layout = {"tensor": 2, "context": 4}
    assert not problems(model=model, parallel=layout)
    assert not problems(model=model, parallel={**layout, "softmax_exchange": "ring"})
    refused = problems(model=model, parallel={**layout, "softmax_exchange": "heads"})[
        "parallel.softmax_exchange"
    ]
    key = "model.attention_pattern.1" if "attention_pattern" in attention else "model.attention"
    reason = f"needs heads that divide over parallel.context=4, and a tensor rank has 2 in {key}"
    assert (refused.reason, refused.remedy) == (reason, "set ring or auto")
    assert not problems(model=model, parallel={**layout, "context": 2, "softmax_exchange": "heads"})
    assert not problems(model={"attention": "flurka"}, parallel={**layout, "softmax_exchange": "heads"})


def test_other_quadratic_mechanisms_need_heads_that_divide_over_context_ranks():
    parallel = {"tensor": 2, "context": 4, "softmax_exchange": "ring"}
    for attention in ("gaussian", "mgk"):
        refused = problems(model={"attention": attention}, parallel=parallel)["parallel.context"]
        assert "does not divide the 2 heads of a tensor rank" in refused.reason


@pytest.mark.parametrize(
    "deepspeed",
    [
        {"train_micro_batch_size_per_gpu": 2},
        {"gradient_accumulation_steps": 2},
        {"gradient_clipping": 1.0},
        {"bf16": {"enabled": True}},
        {"fp16": {"enabled": False}},
        {"optimizer": {"type": "Adam"}},
        {"scheduler": {}},
        {"steps_per_print": 10},
    ],
)
def test_deepspeed_keys_that_megakernel_sets_are_refused(deepspeed):
    (problem,) = problems(deepspeed=deepspeed).values()
    assert problem.key == f"deepspeed.{next(iter(deepspeed))}"
    assert problem.remedy.startswith("remove it and set ")


def test_only_the_stage_is_refused_in_zero_optimization():
    assert list(problems(deepspeed={"zero_optimization": "hello"})) == ["deepspeed.zero_optimization"]
    (key,) = problems(deepspeed={"zero_optimization": {"reduce_bucket_size": "hello"}})
    assert key == "deepspeed.zero_optimization.reduce_bucket_size"
    found = problems(deepspeed={"zero_optimization": {"stage": 1, "overlap_comm": False}})
    assert list(found) == ["deepspeed.zero_optimization.stage"]
    assert not problems(
        deepspeed={"zero_optimization": {"overlap_comm": False}, "wall_clock_breakdown": True}
    )


def test_data_parallel_size_is_the_world_size_over_the_other_sizes():
    parallel = {"tensor": 2, "context": 2, "pipeline": 2}
    assert data_parallel_size(config(parallel=parallel), 32) == 4


def test_an_indivisible_world_size_is_refused_with_the_nearest_valid_ones():
    with pytest.raises(ConfigError, match=r"processes=7 .* = 2 x 2 x 1 = 4; start 4 or 8 or change parallel"):
        data_parallel_size(config(parallel={"tensor": 2, "context": 2}), 7)


def test_an_indivisible_batch_size_is_refused_with_the_nearest_valid_ones():
    with pytest.raises(ConfigError, match=r"training.global_batch_size=8 .* = 2 x 3 = 6; set 6 or 12"):
        data_parallel_size(config(training={"micro_batch_size": 2}), 3)


@pytest.mark.parametrize(("activation", "gated"), [("swiglu", True), ("geglu_tanh", True), ("gelu", False)])
def test_lora_targets_a_gate_only_in_gated_mlps(activation, gated):
    optimizer = {"trained": "lora", "lora": {"targets": ["gate", "up"]}}
    found = problems(model={"activation": activation}, init={"from": "dense"}, optimizer=optimizer)
    assert ("optimizer.lora.targets" in found) is not gated
