"""The schedule of sequence lengths: its phases, and its constraints."""

from pathlib import Path

import pytest

from megakernel.config import (
    ConfigError,
    RopeScaling,
    check_same_run,
    data_parallel_size,
    from_yaml,
    to_yaml,
)

from .trees import config, problems

FOLDER = Path("runs/small")
YARN = {"kind": "yarn", "factor": 8, "original_seq_len": 64}
SCHEDULE = [
    {"until_step": 40, "seq_len": 64, "global_batch_size": 32, "micro_batch_size": 4, "rope_base": 1000.0},
    {"until_step": 60, "seq_len": 256, "rope_scaling": {"kind": "none"}},
]


def growing(**sections):
    """100 steps: 40 of 64 tokens, 20 of 256, 40 of 512."""
    training = {"seq_len_schedule": SCHEDULE, **sections.pop("training", {})}
    return config(training=training, model={"rope_scaling": YARN, **sections.pop("model", {})}, **sections)


def test_a_phase_overrides_keys_of_the_last_phase():
    run = growing()
    first, second, last = run.training.phases
    assert [phase.first_step for phase in run.training.phases] == [0, 40, 60]
    assert last.end_step == 100
    sizes = [
        (p.training.seq_len, p.training.global_batch_size, p.training.micro_batch_size)
        for p in (first, second, last)
    ]
    assert sizes == [(64, 32, 4), (256, 8, 1), (512, 8, 1)]
    rotary = [(m.rope_base, m.rope_scaling.kind) for m in (p.model(run.model) for p in (first, second, last))]
    assert rotary == [(1000.0, "yarn"), (10_000.0, "none"), (10_000.0, "yarn")]
    assert [phase.first_sample for phase in run.training.phases] == [0, 40 * 32, 40 * 32 + 20 * 8]


def test_consumed_samples_and_tokens_add_up_over_phases():
    training = growing().training
    lengths = [training.phase_of(step).training.seq_len for step in (0, 39, 40, 59, 60, 99, 100)]
    assert lengths == [64, 64, 256, 256, 512, 512, 512]
    # After 40 steps the weights were trained only on sequences of 64 tokens; so they count before the first step.
    assert [training.last_trained_phase(done).training.seq_len for done in (0, 40, 41, 100)] == [
        64,
        64,
        256,
        512,
    ]
    assert training.consumed(40) == (1280, 1280 * 64)
    assert training.consumed(70) == (1280 + 240, 1280 * 64 + 160 * 256 + 80 * 512)


def test_without_a_schedule_there_is_one_phase():
    (only,) = config().training.phases
    assert (only.first_step, only.end_step, only.key) == (0, 100, "training")
    assert only.training == config().training
    assert config().training.consumed(100) == (800, 800 * 512)


def test_a_run_shorter_than_its_schedule_uses_its_first_phases():
    training = growing(training={"steps": 30}).training
    assert training.phase_of(29).training.seq_len == 64
    assert training.consumed(30) == (960, 960 * 64)


def test_a_schedule_round_trips_through_yaml():
    assert from_yaml(to_yaml(growing())) == growing()


@pytest.mark.parametrize(
    ("sections", "key", "remedy"),
    [
        ({"training": {"seq_len_schedule": [{"until_step": 5, "seq_len": 1024}]}},
         "training.seq_len", "set at least 1024"),
        ({"training": {"seq_len_schedule": [SCHEDULE[0], {**SCHEDULE[1], "seq_len": 32}]}},
         "training.seq_len_schedule.1.seq_len", "set at least 64"),
        ({"training": {"seq_len_schedule": [SCHEDULE[0], {**SCHEDULE[1], "until_step": 40}]}},
         "training.seq_len_schedule.1.until_step", "set more than 40"),
        ({"training": {"seq_len_schedule": [{**SCHEDULE[0], "micro_batch_size": 5}]}},
         "training.seq_len_schedule.0.global_batch_size", "set 30 or 35"),
        ({"training": {"micro_batch_size": 3, "seq_len_schedule": SCHEDULE[1:]}},
         "training.seq_len_schedule.0.global_batch_size", "set 6 or 9"),
        ({"training": {"eval_seq_len": 513}}, "training.eval_seq_len",
         "set at most seq_len; `megakernel evaluate --seq-len` measures longer samples"),
        ({"training": {"seq_len_schedule": [{"until_step": 5, "seq_len": 320}]},
          "parallel": {"context": 2}, "model": {"attention": "flurka"}},
         "training.seq_len_schedule.0.seq_len", "set 256 or 384"),
        ({"training": {"eval_seq_len": 320}, "parallel": {"context": 2}, "model": {"attention": "flurka"}},
         "training.eval_seq_len", "set 256 or 384"),
        ({"training": {"seq_len_schedule": SCHEDULE}, "model": {"position": "sinusoidal"}},
         "training.seq_len_schedule.0.rope_base", "remove it or take model.position: rope"),
        ({"model": {"position": "none", "rope_scaling": YARN}}, "model.rope_scaling",
         "remove it or take position: rope"),
        ({"model": {"rope_scaling": {"kind": "yarn", "factor": 2}}}, "model.rope_scaling.original_seq_len",
         "add original_seq_len"),
        ({"model": {"rope_scaling": {"kind": "linear", "factor": 2, "original_seq_len": 64}}},
         "model.rope_scaling.original_seq_len", "remove it or take kind: yarn or llama3 or longrope or dynamic"),
        ({"model": {"rope_scaling": {"factor": 2}}}, "model.rope_scaling.factor",
         "remove it or take kind: linear or ntk or yarn or llama3 or dynamic or longrope"),
        ({"model": {"rope_scaling": {**YARN, "beta_slow": 40}}}, "model.rope_scaling.beta_slow",
         "set less than 32"),
    ],
)  # fmt: skip
def test_errors_of_a_phase_name_its_key(sections, key, remedy):
    assert problems(**sections)[key].remedy == remedy


def test_the_batch_of_every_phase_must_divide_over_the_ranks():
    run = config(
        training={
            "global_batch_size": 6,
            "seq_len_schedule": [{"until_step": 5, "seq_len": 64, "global_batch_size": 8}],
        }
    )
    with pytest.raises(
        ConfigError, match=r"training\.seq_len_schedule\.0\.global_batch_size=8 .*; set 6 or 9"
    ):
        data_parallel_size(run, 3)


@pytest.mark.parametrize(
    "training",
    [
        {"steps": 500},
        {"seq_len_schedule": [{**SCHEDULE[0], "micro_batch_size": 1}, SCHEDULE[1]]},
        {"eval_seq_len": 64},
        # A new phase after the original steps.
        {"steps": 200, "seq_len": 1024, "seq_len_schedule": [*SCHEDULE, {"until_step": 100, "seq_len": 512}]},
        {"steps": 200, "seq_len": 1024, "seq_len_schedule": [*SCHEDULE, {"until_step": 150, "seq_len": 512}]},
    ],
)  # fmt: skip
def test_a_run_can_be_extended_with_longer_sequences(training):
    assert check_same_run(to_yaml(growing()), growing(training=training), FOLDER)


def test_a_run_of_one_length_can_be_extended_with_other_rotary_frequencies():
    wanted = config(
        model={"rope_base": 5e5, "rope_scaling": YARN},
        training={
            "steps": 120,
            "seq_len": 4096,
            "global_batch_size": 1,
            "seq_len_schedule": [
                {
                    "until_step": 100,
                    "seq_len": 512,
                    "global_batch_size": 8,
                    "rope_base": 1e4,
                    "rope_scaling": {"kind": "none"},
                }
            ],
        },
    )
    keys = {difference.key for difference in check_same_run(to_yaml(config()), wanted, FOLDER)}
    assert {"training.seq_len", "training.seq_len_schedule", "model.rope_base"} <= keys


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"seq_len_schedule": SCHEDULE[:1]}, "training.seq_len_schedule"),
        ({"seq_len_schedule": [SCHEDULE[0], {**SCHEDULE[1], "until_step": 61}]}, "training.seq_len_schedule"),
        ({"seq_len_schedule": [{**SCHEDULE[0], "rope_base": 2000.0}, SCHEDULE[1]]}, "training.seq_len_schedule"),
        ({"seq_len": 1024}, "training.seq_len"),
        ({"steps": 200, "seq_len": 1024, "seq_len_schedule": [*SCHEDULE, {"until_step": 99, "seq_len": 512}]},
         "training.seq_len"),
    ],
)  # fmt: skip
def test_the_schedule_of_the_original_steps_cannot_change(training, key):
    with pytest.raises(ConfigError, match="when the run began") as caught:
        check_same_run(to_yaml(growing()), growing(training=training), FOLDER)
    assert key in {problem.key for problem in caught.value.problems}


def test_learned_positions_limit_the_extension_of_a_run():
    extended = {
        "steps": 120,
        "seq_len": 1024,
        "seq_len_schedule": [{"until_step": 100, "seq_len": 512}],
    }
    learned = {"position": "learned"}
    with pytest.raises(ConfigError, match=r"training\.seq_len=1024 was 512"):
        check_same_run(to_yaml(config(model=learned)), config(model=learned, training=extended), FOLDER)
    large_table = {"position": "learned", "max_positions": 2048}
    assert check_same_run(
        to_yaml(config(model=large_table)), config(model=large_table, training=extended), FOLDER
    )


def test_the_default_is_no_rope_scaling():
    assert config().model.rope_scaling == RopeScaling()


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [
        (1, 1),
        (256 * 8, 1),
        (256 * 8 + 1, 2),
        (2e6, 977),  # YAML reads 2e6 as a number with a fraction
        (2_000_000, 977),
    ],
)
def test_the_length_of_a_run_may_be_given_in_tokens(tokens, steps):
    training = config(training={"steps": None, "tokens": tokens, "seq_len": 256}).training
    assert (training.steps, training.tokens) == (steps, None)
    assert training.consumed(steps - 1)[1] < tokens <= training.consumed(steps)[1]


@pytest.mark.parametrize("tokens", [100, 30 * 8 * 128, 30 * 8 * 128 + 1, 500_000, 10_000_000])
def test_tokens_count_the_shorter_sequences_of_earlier_phases(tokens):
    training = growing(training={"steps": None, "tokens": tokens}).training
    assert training.consumed(training.steps - 1)[1] < tokens <= training.consumed(training.steps)[1]


def test_a_run_in_tokens_is_recorded_in_steps_and_can_be_extended():
    short = config(training={"steps": None, "tokens": 100 * 8 * 512})
    assert short == config()
    longer = config(training={"steps": None, "tokens": 200 * 8 * 512})
    [change] = check_same_run(to_yaml(short), longer, FOLDER)
    assert (change.key, change.recorded, change.wanted) == ("training.steps", 100, 200)


@pytest.mark.parametrize(
    ("training", "key", "said"),
    [
        ({"tokens": 1000}, "training.tokens", "is given beside training.steps=100"),
        ({"steps": None, "tokens": 0}, "training.tokens", "greater than 0"),
        ({"steps": None, "tokens": 10.5}, "training.tokens", "integer"),
        ({"steps": None, "tokens": True}, "training.tokens", "should be a number"),
        ({"steps": None, "tokens": "many"}, "training.tokens", "integer"),
        ({"steps": None, "tokens": 2**64}, "training.tokens", "beyond 64 bits"),
        ({"steps": None}, "training.steps", "integer"),
        ({"steps": None, "tokens": 1000, "seq_len": 0}, "training.seq_len", "greater than 0"),
    ],
)
def test_a_wrong_number_of_tokens_is_refused_with_its_key(training, key, said):
    found = problems(training=training)
    assert list(found) == [key]
    assert said in found[key].reason
