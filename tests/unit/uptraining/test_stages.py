"""Which training runs an uptrain section means."""

from pathlib import Path

import pytest

from data_pipeline.order import ConsumptionOrder, Share
from megakernel.config import ConfigError, RopeScaling
from megakernel.config.section import merged
from megakernel.uptraining.stages import check_stages, stages
from tests.unit.config.trees import config, problems

FLURKA = {"preset": "flurka", "compression": {"block_size": 32, "rank": 4}}


def made(sections=None, **uptrain):
    """An up-training; sections: further keys."""
    usual = {
        "run": {"name": "up", "seed": 5},
        "model": {"attention": FLURKA},
        "init": {"from": "models/dense"},
        "optimizer": {"lr": 1e-3, "mechanism_lr": 1e-2},
        "uptrain": uptrain,
    }
    return config(**merged(usual, sections or {}))


def rows_of(stage):
    """Places in the stream that a stage reads, in order."""
    training = stage.config.training
    order = ConsumptionOrder(training.phases[-1], Share())
    return [row for step in range(training.steps) for rows in order.indices(step) for row in rows]


def test_the_main_stage_alone_distils_from_the_dense_model():
    (only,) = stages(made())
    run = only.config
    assert run.run.folder == Path("runs/up/1-main")
    assert str(run.init.source) == str(run.objective.teacher) == "models/dense"
    assert (run.objective.kind, run.training.steps, run.uptrain) == ("distill", 100, None)


def test_every_stage_starts_from_the_one_before():
    plan = stages(
        made(
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
    # alpha and anneal are shares of training.steps; a run from scratch reads what the transfer read, too.
    assert [run.training.steps for run in runs] == [20, 30, 10, 10, 50, 7, 120]
    transfer = runs[0]
    assert (transfer.optimizer.trained, transfer.optimizer.lr, transfer.objective.rows) == (
        "mechanism",
        0.05,
        8,
    )
    assert [run.optimizer.trained for run in runs[1:]] == ["all"] * 6
    assert [run.optimizer.lr for run in runs[1:]] == [*[1e-3] * 4, 2e-4, 0.002]
    # In longer sequences the ratio of both rates stays; from scratch all weights are new.
    assert [run.optimizer.mechanism_lr for run in runs[1:5]] == [1e-2] * 4
    assert runs[5].optimizer.mechanism_lr == pytest.approx(2e-3)
    assert runs[6].optimizer.mechanism_lr is None
    assert [run.objective.kind for run in runs] == ["transfer", *["distill"] * 4, "labels", "labels"]
    assert (runs[5].training.seq_len, runs[5].model.rope_scaling.factor) == (1024, 2.0)


def test_the_scaling_of_longer_rows_takes_the_place_of_the_models():
    llama = {"kind": "llama3", "factor": 32.0, "original_seq_len": 8192, "high_freq_factor": 4.0}
    yarn = {"kind": "yarn", "factor": 4.0, "original_seq_len": 512}
    scaled = {"model": {"rope_scaling": llama}}
    main, length = stages(made(scaled, length={"steps": 7, "seq_len": 1024, "rope_scaling": yarn}))
    assert main.config.model.rope_scaling == RopeScaling(**llama)
    assert length.config.model.rope_scaling == RopeScaling(**yarn)


def test_a_stage_that_cannot_be_is_refused_before_any_is_run():
    """Also where layers are yet to be chosen, and the stages behind are not known."""
    given = {"layers": {"keep": 1}, "transfer": {"steps": 5}}
    with pytest.raises(
        ConfigError,
        match=r"^parallel.softmax_exchange=heads needs heads .* \(stage 2-main of uptrain\); set ring",
    ):
        check_stages(made({"parallel": {"context": 8, "softmax_exchange": "heads"}}, **given), 8)
    check_stages(made(**given), 1)


def test_a_batch_that_the_processes_cannot_share_is_refused_before_any_stage_is_run():
    given = made(length={"steps": 1, "seq_len": 1024, "global_batch_size": 1})
    with pytest.raises(
        ConfigError,
        match=r"^training.global_batch_size=1 is not a multiple of .* \(stage 2-length of uptrain\)",
    ):
        check_stages(given, 2)
    check_stages(given, 1)


def test_windows_are_not_shut_past_the_stages():
    given = made({"training": {"near_dropout": {"start": 0.3, "steps": 3}}})
    with pytest.raises(
        ConfigError, match=r"training.near_dropout=.* set null, and uptrain.near_dropout: 0.3"
    ):
        check_stages(given, 1)


@pytest.mark.parametrize(("zero_stage", "of_transfer"), [(1, 1), (3, 2)])
def test_a_transfer_freezes_weights_and_zero_3_saves_none_of_those(zero_stage, of_transfer):
    transfer, main = stages(made({"parallel": {"zero_stage": zero_stage}}, transfer={"steps": 5}))
    assert (transfer.config.parallel.zero_stage, main.config.parallel.zero_stage) == (of_transfer, zero_stage)


def test_no_row_is_read_twice_and_what_is_compared_reads_the_same():
    plan = stages(
        made(
            transfer={"steps": 20},
            alpha=0.3,
            length={"steps": 7, "seq_len": 1024},
            from_scratch=True,
            train_dense=True,
        ),
        dense=config().model,
    )
    seen = {stage.name: rows_of(stage) for stage in plan}
    assert {stage.config.run.seed for stage in plan if stage.name != "6-length"} == {5}
    student = [
        row for name in ("1-transfer", "2-base", "3-rank16", "4-rank8", "5-main") for row in seen[name]
    ]
    assert student == seen["7-scratch"] == seen["8-dense"]
    assert len(set(student)) == len(student)


def test_stages_that_train_all_weights_have_one_schedule_and_hand_their_moments_on():
    moments = {"init": {"moments": "runs/dense"}}
    given = made(moments, transfer={"steps": 20}, alpha=0.3, from_scratch=True, train_dense=True)
    transfer, base, rank16, rank8, main, scratch, dense = stages(given, dense=config().model)
    parts = [stage.config.schedule for stage in (base, rank16, rank8, main)]
    assert [(part.steps_before, part.steps_after) for part in parts] == [(0, 70), (30, 55), (45, 40), (60, 0)]
    assert {stage.config.schedule.steps_after for stage in (transfer, scratch, dense)} == {0}
    found = [stage.config.init.moments for stage in (transfer, base, rank16, rank8, main, scratch, dense)]
    folders = [Path("runs/up") / name for name in ("2-base", "3-rank16", "4-rank8")]
    # The transfer trains what the dense model has not; a stage behind it goes on where the dense model stopped.
    assert found == [None, Path("runs/dense"), *folders, None, Path("runs/dense")]


def test_low_rank_updates_begin_anew_in_each_stage():
    updates = {"optimizer": {"trained": "lora"}, "init": {"moments": "runs/dense"}}
    given = made(updates, alpha=0.3, length={"steps": 7, "seq_len": 1024}, train_dense=True)
    plan = stages(given, dense=config().model)
    assert [stage.config.init.moments for stage in plan] == [*[None] * 5, Path("runs/dense")]


def test_where_rows_grow_a_stage_draws_an_order_of_its_own():
    given = {"transfer": {"steps": 20}, "length": {"steps": 7, "seq_len": 1024}}
    skipping = {"skip_samples": [[0, 800]]}
    transfer, main, length = stages(made({"training": skipping}, **given))
    assert [stage.config.run.seed for stage in (transfer, main, length)] == [5, 5, 8]
    assert length.config.training.skip_samples == []
    growing = skipping | {"seq_len_schedule": [{"until_step": 10, "seq_len": 256}]}
    transfer, main, _ = stages(made({"training": growing}, **given))
    assert [stage.config.run.seed for stage in (transfer, main)] == [6, 7]
    assert transfer.config.training.skip_samples == main.config.training.skip_samples == [(0, 800)]


def read_by_step(stages):
    """Sequences of a step and their length, step by step."""
    runs = [stage.config.training for stage in stages]
    phases = [run.phase_of(step).training for run in runs for step in range(run.steps)]
    return [(phase.global_batch_size, phase.seq_len) for phase in phases]


@pytest.mark.parametrize("until_step", [10, 30])
def test_rows_grow_over_the_stages_as_they_do_over_the_steps(until_step):
    phases = [
        {"until_step": 3, "seq_len": 128, "global_batch_size": 16},
        {"until_step": until_step, "seq_len": 256},
    ]
    given = made(
        {"training": {"steps": 20, "seq_len_schedule": phases}},
        transfer={"steps": 4},
        alpha=0.3,
        from_scratch=True,
        train_dense=True,
        length={"steps": 2, "seq_len": 600},
    )
    transfer, *student, length, scratch, dense = stages(given, dense=config().model)
    assert [stage.config.training.steps for stage in student] == [6, 3, 3, 8]
    expected = [
        (p.global_batch_size, p.seq_len)
        for p in (given.training.phase_of(step).training for step in range(20))
    ]
    assert read_by_step(student) == expected
    assert read_by_step([transfer]) == [(8, 512)] * 4
    assert read_by_step([length]) == [(8, 600)] * 2
    assert read_by_step([scratch]) == read_by_step([dense]) == expected + read_by_step([transfer])


def test_stages_have_the_steps_of_training_and_each_has_one():
    of_128 = {"model": {"attention": FLURKA | {"compression": {"block_size": 128, "rank": 1}}}}
    plan = stages(made(of_128 | {"training": {"steps": 21}}, alpha=0.3))
    assert [stage.config.training.steps for stage in plan] == [6, 1, 1, 1, 1, 1, 2, 8]
    with pytest.raises(
        ConfigError, match=r"^training.steps=5 leaves a stage without a step: .* 8 that share"
    ):
        stages(made(of_128 | {"training": {"steps": 5}}, alpha=0.3))


def test_rows_that_the_dense_model_has_read_are_passed_over():
    skipping = {"training": {"skip_samples": [[0, 800], [805, 810]]}}
    transfer, main = stages(made(skipping, transfer={"steps": 20}))
    assert rows_of(transfer)[:6] == [800, 801, 802, 803, 804, 810]
    assert rows_of(main)[0] == rows_of(transfer)[-1] + 1


def test_the_dense_model_goes_on_with_its_own_layers():
    dense = config(
        model={"attention_pattern": ["softmax", {"preset": "local", "near": {"block_size": 16}}]}
    ).model
    *_, control = stages(made(train_dense=True), dense=dense)
    assert control.is_control
    assert str(control.config.init.source) == "models/dense"
    windows = [control.config.model.layer_attention(layer).window for layer in range(4)]
    assert windows == [dense.layer_attention(layer).window for layer in range(4)]
    assert (control.config.objective.kind, control.config.optimizer.mechanism_lr) == ("labels", None)


def test_a_low_rank_base_is_softmax_over_the_same_landmarks():
    base, main = stages(made(alpha=0.25, base="low_rank"))
    attention = base.config.model.attention
    assert (attention.similarity, attention.feature_map, attention.near.join) == ("softmax", None, "shared")
    assert attention.compression == main.config.model.attention.compression
    assert (base.config.training.steps, main.config.training.steps) == (25, 75)


@pytest.mark.parametrize("base", ["kernel", "low_rank"])
def test_near_windows_are_shut_in_the_first_stage_that_has_gates(base):
    plan = stages(made(alpha=0.25, base=base, anneal=0.0, near_dropout=0.4))
    starts = [
        run.near_dropout and run.near_dropout.start for run in (stage.config.training for stage in plan)
    ]
    assert starts == ([0.4, None] if base == "kernel" else [None, 0.4])


def test_without_kl_no_teacher_is_loaded():
    (only,) = stages(made(distill={"kl": 0.0}))
    assert (only.config.objective.kind, only.config.objective.teacher) == ("labels", None)


def test_the_main_stage_may_learn_from_another_model_than_it_starts_from():
    plan = stages(made(transfer={"steps": 3}, distill={"teacher": "models/larger"}))
    assert [stage.config.objective.teacher for stage in plan] == [
        plan[0].config.init.source,
        Path("models/larger"),
    ]


def test_layers_that_stay_softmax():
    (only,) = stages(made(layers={"keep": [0, 3]}))
    kinds = [only.config.model.layer_attention(layer).is_full_softmax for layer in range(4)]
    assert kinds == [True, False, False, True]


def test_layers_that_stay_keep_the_windows_of_the_dense_model():
    sliding = {"preset": "softmax", "window": 16}
    dense = config(model={"attention_pattern": [sliding, "softmax", "softmax", sliding]}).model
    (only,) = stages(made(layers={"keep": [0, 1]}), dense=dense)
    kept = [only.config.model.layer_attention(layer) for layer in range(4)]
    assert [layer.window for layer in kept] == [16, None, None, None]
    assert [layer.is_full_softmax for layer in kept] == [True, True, False, False]


def test_a_number_of_layers_is_chosen_after_the_transfer():
    chosen_later = made(layers={"keep": 1}, transfer={"steps": 5})
    assert [stage.name for stage in stages(chosen_later)] == ["1-transfer"]
    transfer, main = stages(chosen_later, kept=[2])
    assert transfer.config.model.attention_pattern is None  # all layers' errors are needed to choose
    assert main.config.model.layer_attention(2).is_full_softmax


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
        ({}, {"schedule": {"steps_after": 5}}, "schedule.steps_after"),
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
def test_an_up_training_that_cannot_be_is_refused(uptrain, sections, key):
    assert list(problems(**{"init": {"from": "x"}, "uptrain": uptrain} | sections)) == [key]


def test_blocks_say_what_they_cannot_be_beside():
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
def test_what_is_refused(sections, key):
    assert list(problems(**sections)) == [key]


def test_longer_rows_are_named_by_their_own_keys():
    sections = {
        "uptrain": {"length": {"steps": 1, "seq_len": 1024}},
        "init": {"from": "x"},
        "model": {"position": "learned", "max_positions": 600},
    }
    (problem,) = problems(**sections).values()
    assert (
        str(problem) == "model.max_positions=600 is less than uptrain.length.seq_len=1024; set at least 1024"
    )
