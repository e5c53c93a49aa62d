"""The training runs of an uptrain section."""

from pathlib import Path

import pytest

from data_pipeline.order import ConsumptionOrder, Share
from megakernel.config import Attention, ConfigError, RopeScaling, expand_preset
from megakernel.config.section import merged
from megakernel.uptraining.stages import check_stages, stages
from tests.unit.config.trees import config, problems

FLURKA = {"preset": "flurka", "compression": {"block_size": 32, "rank": 4}}


ENCODER = {
    "model": {"kind": "masked_lm", "attention": "flurka_rnn", "max_positions": 512},
    "data": {"isolate_documents": False},
}
CLASSES = {"kind": "classifier", "classifier": {"num_classes": 2}}


def uptraining(sections=None, **uptrain):
    """An up-training; `sections` adds keys outside of `uptrain`."""
    defaults = {
        "run": {"name": "up", "seed": 5},
        "model": {"attention": FLURKA},
        "init": {"from": "models/dense"},
        "optimizer": {"lr": 1e-3, "mechanism_lr": 1e-2},
        "uptrain": uptrain,
    }
    return config(**merged(defaults, sections or {}))


def samples_of(stage):
    """Stream indices that a stage reads, in order."""
    training = stage.config.training
    order = ConsumptionOrder(training.phases[-1], Share())
    return [index for step in range(training.steps) for indices in order.indices(step) for index in indices]


def test_without_other_stages_the_main_stage_distills_from_the_dense_model():
    (only,) = stages(uptraining())
    run = only.config
    assert run.run.folder == Path("runs/up/1-main")
    assert str(run.init.source) == str(run.objective.teacher) == "models/dense"
    assert (run.objective.kind, run.training.steps, run.uptrain) == ("distill", 100, None)


def test_every_stage_starts_from_the_previous_one():
    plan = stages(
        uptraining(
            transfer={"steps": 20, "lr": 0.05, "rows": 8},
            alpha=0.3,
            anneal=0.2,
            length={"steps": 7, "seq_len": 1024, "rope_scaling": {"kind": "ntk", "factor": 2.0}, "lr": 2e-4},
            from_scratch=True,
            scratch_lr=0.002,
        )
    )
    names = ["1-transfer", "2-base", "3-rank16", "4-rank8", "5-main", "6-length", "7-scratch"]
    assert [stage.name for stage in plan] == names
    runs = [stage.config for stage in plan]
    assert [run.init.source for run in runs] == [
        Path("models/dense"),
        *(Path("runs/up") / name for name in names[:5]),
        None,
    ]
    ranks = [run.model.attention.compression.rank for run in runs]
    assert ranks == [32, 32, 16, 8, 4, 4, 4]
    # alpha and anneal are fractions of training.steps; a run from scratch also reads the samples of the transfer.
    assert [run.training.steps for run in runs] == [20, 30, 10, 10, 50, 7, 120]
    transfer = runs[0]
    assert (transfer.optimizer.trained, transfer.optimizer.lr, transfer.objective.rows) == (
        "mechanism",
        0.05,
        8,
    )
    assert [run.optimizer.trained for run in runs[1:]] == ["all"] * 6
    assert [run.optimizer.lr for run in runs[1:]] == [*[1e-3] * 4, 2e-4, 0.002]
    # The length stage keeps the ratio of the two rates; from scratch all weights are new.
    assert [run.optimizer.mechanism_lr for run in runs[1:5]] == [1e-2] * 4
    assert runs[5].optimizer.mechanism_lr == pytest.approx(2e-3)
    assert runs[6].optimizer.mechanism_lr is None
    assert [run.objective.kind for run in runs] == ["transfer", *["distill"] * 4, "labels", "labels"]
    assert (runs[5].training.seq_len, runs[5].model.rope_scaling.factor) == (1024, 2.0)


def test_the_rope_scaling_of_the_length_stage_replaces_the_models():
    llama = {"kind": "llama3", "factor": 32.0, "original_seq_len": 8192, "high_freq_factor": 4.0}
    yarn = {"kind": "yarn", "factor": 4.0, "original_seq_len": 512}
    scaled = {"model": {"rope_scaling": llama}}
    main, length = stages(uptraining(scaled, length={"steps": 7, "seq_len": 1024, "rope_scaling": yarn}))
    assert main.config.model.rope_scaling == RopeScaling(**llama)
    assert length.config.model.rope_scaling == RopeScaling(**yarn)


def test_an_invalid_stage_is_refused_before_any_stage_runs():
    """Even if layers are still to be chosen, so that later stages are not yet known."""
    section = {"layers": {"keep": 1}, "transfer": {"steps": 5}}
    with pytest.raises(
        ConfigError,
        match=r"^parallel.softmax_exchange=heads needs heads .* \(stage 2-main of uptrain\); set ring",
    ):
        check_stages(uptraining({"parallel": {"context": 8, "softmax_exchange": "heads"}}, **section), 8)
    check_stages(uptraining(**section), 1)


def test_an_indivisible_batch_is_refused_before_any_stage_runs():
    section = uptraining(length={"steps": 1, "seq_len": 1024, "global_batch_size": 1})
    with pytest.raises(
        ConfigError,
        match=r"^training.global_batch_size=1 is not a multiple of .* \(stage 2-length of uptrain\)",
    ):
        check_stages(section, 2)
    check_stages(section, 1)


def test_near_dropout_is_set_in_uptrain_only():
    section = uptraining({"training": {"near_dropout": {"start": 0.3, "steps": 3}}})
    with pytest.raises(
        ConfigError, match=r"training.near_dropout=.* set null, and uptrain.near_dropout: 0.3"
    ):
        check_stages(section, 1)


@pytest.mark.parametrize(("zero_stage", "of_transfer"), [(1, 1), (3, 2)])
def test_a_transfer_uses_zero_2_in_place_of_zero_3(zero_stage, of_transfer):
    transfer, main = stages(uptraining({"parallel": {"zero_stage": zero_stage}}, transfer={"steps": 5}))
    assert (transfer.config.parallel.zero_stage, main.config.parallel.zero_stage) == (of_transfer, zero_stage)


def test_no_sample_is_read_twice_and_compared_runs_read_the_same_samples():
    plan = stages(
        uptraining(
            transfer={"steps": 20},
            alpha=0.3,
            length={"steps": 7, "seq_len": 1024},
            from_scratch=True,
            train_dense=True,
        ),
        dense=config().model,
    )
    samples = {stage.name: samples_of(stage) for stage in plan}
    assert {stage.config.run.seed for stage in plan if stage.name != "6-length"} == {5}
    student = [
        index for name in ("1-transfer", "2-base", "3-rank16", "4-rank8", "5-main") for index in samples[name]
    ]
    assert student == samples["7-scratch"] == samples["8-dense"]
    assert len(set(student)) == len(student)


def test_stages_that_train_all_weights_share_schedule_and_moments():
    moments = {"init": {"moments": "runs/dense"}}
    section = uptraining(moments, transfer={"steps": 20}, alpha=0.3, from_scratch=True, train_dense=True)
    transfer, base, rank16, rank8, main, scratch, dense = stages(section, dense=config().model)
    parts = [stage.config.schedule for stage in (base, rank16, rank8, main)]
    assert [tuple(dict(schedule.part).values()) for schedule in parts] == [
        (0, 70),
        (30, 55),
        (45, 40),
        (60, 0),
    ]
    assert {stage.config.schedule.part.steps_after for stage in (transfer, scratch, dense)} == {0}
    found = [stage.config.init.moments for stage in (transfer, base, rank16, rank8, main, scratch, dense)]
    folders = [Path("runs/up") / name for name in ("2-base", "3-rank16", "4-rank8")]
    # The transfer trains weights that the dense model lacks; the next stage continues from the dense model's moments.
    assert found == [None, Path("runs/dense"), *folders, None, Path("runs/dense")]


def test_low_rank_updates_restart_their_moments_in_each_stage():
    updates = {"optimizer": {"trained": "lora"}, "init": {"moments": "runs/dense"}}
    section = uptraining(updates, alpha=0.3, length={"steps": 7, "seq_len": 1024}, train_dense=True)
    plan = stages(section, dense=config().model)
    assert [stage.config.init.moments for stage in plan] == [*[None] * 5, Path("runs/dense")]


def test_stages_with_other_sequence_lengths_use_their_own_order():
    section = {"transfer": {"steps": 20}, "length": {"steps": 7, "seq_len": 1024}}
    skipping = {"skip_samples": [[0, 800]]}
    transfer, main, length = stages(uptraining({"training": skipping}, **section))
    assert [stage.config.run.seed for stage in (transfer, main, length)] == [5, 5, 8]
    assert length.config.training.skip_samples == []
    growing = skipping | {"seq_len_schedule": [{"until_step": 10, "seq_len": 256}]}
    transfer, main, _ = stages(uptraining({"training": growing}, **section))
    assert [stage.config.run.seed for stage in (transfer, main)] == [6, 7]
    assert transfer.config.training.skip_samples == main.config.training.skip_samples == [(0, 800)]


def read_by_step(stages):
    """Batch size and sequence length of each step."""
    runs = [stage.config.training for stage in stages]
    phases = [run.phase_of(step).training for run in runs for step in range(run.steps)]
    return [(phase.global_batch_size, phase.seq_len) for phase in phases]


@pytest.mark.parametrize("until_step", [10, 30])
def test_the_length_schedule_spans_the_stages(until_step):
    phases = [
        {"until_step": 3, "seq_len": 128, "global_batch_size": 16},
        {"until_step": until_step, "seq_len": 256},
    ]
    section = uptraining(
        {"training": {"steps": 20, "seq_len_schedule": phases}},
        transfer={"steps": 4},
        alpha=0.3,
        from_scratch=True,
        train_dense=True,
        length={"steps": 2, "seq_len": 600},
    )
    transfer, *student, length, scratch, dense = stages(section, dense=config().model)
    assert [stage.config.training.steps for stage in student] == [6, 3, 3, 8]
    expected = [
        (p.global_batch_size, p.seq_len)
        for p in (section.training.phase_of(step).training for step in range(20))
    ]
    assert read_by_step(student) == expected
    assert read_by_step([transfer]) == [(8, 512)] * 4
    assert read_by_step([length]) == [(8, 600)] * 2
    assert read_by_step([scratch]) == read_by_step([dense]) == expected + read_by_step([transfer])


def test_the_steps_are_divided_over_the_stages_with_at_least_one_each():
    of_128 = {"model": {"attention": FLURKA | {"compression": {"block_size": 128, "rank": 1}}}}
    plan = stages(uptraining(of_128 | {"training": {"steps": 21}}, alpha=0.3))
    assert [stage.config.training.steps for stage in plan] == [6, 1, 1, 1, 1, 1, 2, 8]
    with pytest.raises(
        ConfigError, match=r"^training.steps=5 leaves a stage without a step: .* 8 that share"
    ):
        stages(uptraining(of_128 | {"training": {"steps": 5}}, alpha=0.3))


def test_skip_samples_shifts_all_stages():
    skipping = {"training": {"skip_samples": [[0, 800], [805, 810]]}}
    transfer, main = stages(uptraining(skipping, transfer={"steps": 20}))
    assert samples_of(transfer)[:6] == [800, 801, 802, 803, 804, 810]
    assert samples_of(main)[0] == samples_of(transfer)[-1] + 1


def test_the_dense_control_run_keeps_its_own_layers():
    dense = config(
        model={"attention_pattern": ["softmax", {"preset": "local", "near": {"block_size": 16}}]}
    ).model
    *_, control = stages(uptraining(train_dense=True), dense=dense)
    assert control.is_control
    assert str(control.config.init.source) == "models/dense"
    windows = [control.config.model.layer_attention(layer).window for layer in range(4)]
    assert windows == [dense.layer_attention(layer).window for layer in range(4)]
    assert (control.config.objective.kind, control.config.optimizer.mechanism_lr) == ("labels", None)


def test_a_low_rank_base_is_softmax_over_the_same_landmarks():
    base, main = stages(uptraining(alpha=0.25, base="low_rank"))
    attention = base.config.model.attention
    assert (attention.similarity, attention.feature_map, attention.near.join) == ("softmax", None, "shared")
    assert attention.compression == main.config.model.attention.compression
    assert (base.config.training.steps, main.config.training.steps) == (25, 75)


@pytest.mark.parametrize("base", ["kernel", "low_rank"])
def test_near_dropout_applies_to_the_first_stage_with_gates(base):
    plan = stages(uptraining(alpha=0.25, base=base, anneal=0.0, near_dropout=0.4))
    starts = [
        run.near_dropout and run.near_dropout.start for run in (stage.config.training for stage in plan)
    ]
    assert starts == ([0.4, None] if base == "kernel" else [None, 0.4])


def test_without_kl_no_teacher_is_loaded():
    (only,) = stages(uptraining(distill={"kl": 0.0}))
    assert (only.config.objective.kind, only.config.objective.teacher) == ("labels", None)


def test_the_main_stage_can_have_another_teacher():
    plan = stages(uptraining(transfer={"steps": 3}, distill={"teacher": "models/larger"}))
    assert [stage.config.objective.teacher for stage in plan] == [
        plan[0].config.init.source,
        Path("models/larger"),
    ]


def test_kept_layers_stay_softmax():
    (only,) = stages(uptraining(layers={"keep": [0, 3]}))
    kinds = [only.config.model.layer_attention(layer).is_plain_softmax for layer in range(4)]
    assert kinds == [True, False, False, True]


def test_kept_layers_have_the_windows_of_the_dense_model():
    sliding = {"preset": "softmax", "window": 16}
    dense = config(model={"attention_pattern": [sliding, "softmax", "softmax", sliding]}).model
    (only,) = stages(uptraining(layers={"keep": [0, 1]}), dense=dense)
    kept = [only.config.model.layer_attention(layer) for layer in range(4)]
    assert [layer.window for layer in kept] == [16, None, None, None]
    assert [layer.is_plain_softmax for layer in kept] == [True, True, False, False]


def test_layers_given_as_a_count_are_chosen_after_the_transfer():
    chosen_later = uptraining(layers={"keep": 1}, transfer={"steps": 5})
    assert [stage.name for stage in stages(chosen_later)] == ["1-transfer"]
    transfer, main = stages(chosen_later, kept=[2])
    assert transfer.config.model.attention_pattern is None  # choosing needs the errors of all layers
    assert main.config.model.layer_attention(2).is_plain_softmax


LONGER = {"steps": 1, "seq_len": 1024}


@pytest.mark.parametrize(
    ("uptrain", "sections", "key"),
    [
        ({}, {"init": {"from": None}}, "init.from"),
        ({"layers": {"keep": 2}}, {}, "uptrain.layers.keep"),
        ({"layers": {"keep": [4]}}, {}, "uptrain.layers.keep"),
        ({"layers": {"keep": [0, 1, 2, 3]}}, {}, "uptrain.layers.keep"),
        ({"layers": {"keep": 4}, "transfer": {"steps": 1}}, {}, "uptrain.layers.keep"),
        ({}, {"model": {"attention": "softmax"}}, "uptrain.layers.keep"),
        ({"distill": {"kl": 0, "cross_entropy": 0}}, {}, "uptrain.distill.cross_entropy"),
        ({"distill": {"kl": 0, "teacher": "models/larger"}}, {}, "uptrain.distill.teacher"),
        ({"alpha": 0.8, "anneal": 0.3}, {}, "uptrain.alpha"),
        ({"alpha": 0.3}, {"model": {"attention": "hedgehog"}}, "uptrain.alpha"),
        (
            {"alpha": 0.3},
            ENCODER | {"model": ENCODER["model"] | {"attention": "performer", "max_positions": None}},
            "uptrain.alpha",
        ),
        ({"alpha": 0.3, "anneal": 0.2}, ENCODER, "uptrain.anneal"),
        ({"transfer": {"steps": 1}}, ENCODER, "uptrain.transfer"),
        ({}, ENCODER | {"model": ENCODER["model"] | CLASSES}, "uptrain.distill.kl"),
        ({"length": LONGER | {"seq_len": 64}}, {}, "uptrain.length.seq_len"),
        (
            {"length": LONGER | {"rope_scaling": {"kind": "ntk", "factor": 2}}},
            {"model": {"position": "sinusoidal", "attention": "hedgehog"}},
            "uptrain.length.rope_scaling",
        ),
        ({"length": LONGER | {"seq_len": 1000}}, {"parallel": {"context": 2}}, "uptrain.length.seq_len"),
        (
            {"length": LONGER | {"global_batch_size": 3}},
            {"training": {"micro_batch_size": 2}},
            "uptrain.length.global_batch_size",
        ),
        (
            {"near_dropout": 0.2},
            {"model": {"attention": FLURKA | {"near": {"join": "shared"}}}},
            "uptrain.near_dropout",
        ),
        ({}, {"schedule": {"steps_after": 5}}, "schedule.part.steps_after"),
        ({}, {"training": {"eval_samples": 0}}, "training.eval_samples"),
        ({}, {"model": {"position": "learned", "attention": FLURKA}}, "model.max_positions"),
        ({"transfer": {"steps": 1, "block_layers": 0}}, {}, "uptrain.transfer.block_layers"),
        ({"transfer": {"steps": 1, "block_layers": 5}}, {}, "uptrain.transfer.block_layers"),
        (
            {"transfer": {"steps": 1, "block_layers": 4}},
            {"parallel": {"pipeline": 2}},
            "uptrain.transfer.block_layers",
        ),
    ],
)
def test_an_invalid_up_training_is_refused(uptrain, sections, key):
    assert list(problems(**{"init": {"from": "x"}, "uptrain": uptrain} | sections)) == [key]


def test_block_layers_with_pipeline_parallelism_is_refused():
    uptrain = {"transfer": {"steps": 1, "block_layers": 2}}
    sections = {"init": {"from": "x"}, "uptrain": uptrain, "parallel": {"pipeline": 2}}
    (problem,) = problems(**sections).values()
    assert str(problem) == (
        "uptrain.transfer.block_layers=2 takes one block after the other, and parallel.pipeline=2 holds all at once; "
        "set null, or parallel.pipeline: 1"
    )


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"init": {"moments": "runs/dense"}}, "init.moments"),
        ({"objective": {"kind": "distill"}}, "objective.teacher"),
        ({"objective": {"teacher": "x"}}, "objective.teacher"),
        ({"objective": {"kind": "distill", "teacher": "x", "rows": 3}}, "objective.rows"),
        ({"optimizer": {"trained": "mechanism"}, "model": {"attention": "softmax"}}, "optimizer.trained"),
    ],
)
def test_invalid_objectives_are_refused(sections, key):
    assert list(problems(**sections)) == [key]


def test_errors_of_the_length_stage_name_its_own_keys():
    sections = {
        "uptrain": {"length": {"steps": 1, "seq_len": 1024}},
        "init": {"from": "x"},
        "model": {"position": "learned", "max_positions": 600},
    }
    (problem,) = problems(**sections).values()
    assert (
        str(problem) == "model.max_positions=600 is less than uptrain.length.seq_len=1024; set at least 1024"
    )


@pytest.mark.parametrize(
    ("preset", "base", "half"),
    [
        ("flurka_performer", "low_rank", "linformer"),
        ("flurka_performer", "kernel", "performer"),
        ("flurka_rnn", "kernel", "linear"),
        ("flurka_eva", "low_rank", "linformer"),
        ("flurka_eva", "kernel", "eva"),
    ],
)
def test_an_encoders_base_is_a_half_of_flurka_without_annealing(preset, base, half):
    sections = ENCODER | {"model": ENCODER["model"] | {"attention": preset}}
    dense = config(model={"attention": "softmax"}).model
    plan = stages(uptraining(sections, alpha=0.75, base=base, train_dense=True), dense=dense)
    assert [stage.name for stage in plan] == ["1-base", "2-main", "3-dense"]
    first, main, control = (stage.config for stage in plan)
    assert first.model.attention == Attention.model_validate(expand_preset(half))
    assert main.model.attention == Attention.model_validate(expand_preset(preset))
    # linformer's columns count positions; without them the key would have no effect.
    assert first.model.max_positions == (None if base == "kernel" else 512)
    assert (main.model.max_positions, control.model.max_positions) == (512, None)
    assert [stage.training.steps for stage in (first, main)] == [75, 25]
    assert main.objective.kind == "distill"
