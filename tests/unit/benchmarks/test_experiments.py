"""Studies: every file is valid, wrong ones are refused by file and key, and pages are written from finished runs."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import training_runs
from benchmarks.experiments.__main__ import listing, main, parse, planned_runs
from benchmarks.experiments.checks import learned
from benchmarks.experiments.measures import (
    MEASURES,
    Against,
    Buckets,
    FirstStep,
    Measure,
    Plain,
    TaskNumber,
    state_size,
)
from benchmarks.experiments.page import correlation_lines, page, text_names
from benchmarks.experiments.plots import curve_bands, scatter_points, write_curves, write_scatter
from benchmarks.experiments.runs import StudyResult, check_names, make_run
from benchmarks.experiments.study import LoadedStudy, Scatter, names, read_study
from megakernel.config import PRESETS, Attention, ConfigError, UserError, expand_preset, load, to_yaml
from megakernel.evaluation.records import file_name
from megakernel.evaluation.run import parse as parse_tasks
from tests.tiers import tiered

ROOT = Path(__file__).parents[3]
PAPERS = ("lra_kl", "lra_skyformer", "lra_mgk", "lra_flurka", "glue_kl", "glue_flurka")


@pytest.mark.parametrize("name", tiered(names(), [name for name in names() if name not in PAPERS]))
def test_every_study_has_valid_runs(name):
    study = read_study(name)
    for variant in study.study.variants:
        runs = [make_run(study, model, variant, seed) for model in study.models for seed in (0, 1)]
        if "{seed}" in study.study.run:
            check_names(runs)
        for run in runs:
            vars(run)["split"] = "validation"  # which the data would say
            assert len(parse_tasks(list(run.tasks.values()))) == len(study.study.tasks)
    assert "{" not in runs[0].fill(study.study.text, **text_names(runs[0]))
    assert len({run.config.run.seed for run in runs}) == 2


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("tile: x", "study.yaml: tile=x is an unknown key; did you mean title?"),
        ("columns: {a: {measure: taks}}", "columns.a.measure=taks is no measure; choose task"),
        ("columns: {a: {format: .3f}}", "columns.a={'format': '.3f'} names no measure; write measure: name"),
        ("columns: {a: {measure: task, off: b}}", "columns.a.off=b is an unknown key; did you mean of?"),
        ("columns: {a: {measure: task, of: b, value_of: x}}", "columns.a.of=b is unknown"),
        (
            "columns: {a: {measure: against, of: b, value_of: x, baseline: z}}",
            "columns.a.baseline=z is unknown; choose y",
        ),
        ("only: [z]", "study.yaml: only=z is unknown; choose y"),
        ("correlations: [[a, b]]", "study.yaml: correlations=b is unknown; choose a"),
        ("scatter: {x: a, y: b, size: -a}", "study.yaml: scatter=b is unknown; choose a"),
        ("columns: {a: {measure: flops_to_loss, baseline: z}}", "columns.a.baseline=z is unknown; choose y"),
        ("checks: [learnt]", "study.yaml: checks=learnt is unknown; choose learned"),
        ("sort: [-b]", "study.yaml: sort=b is unknown; choose a"),
        ("variants: {x: {model: {}}}", "variants.x.model={} is an unknown key; did you mean models?"),
        ("variants: {x: {models: {z: {}}}}", "variants.x.models=z is unknown; choose y"),
        ("models: {y: null}", "models.y=None cannot be read; write PRESET[+PART...], a list of them, or a"),
        ("models: {y: softmax+gates}", "softmax+gates is no preset; choose softmax"),
        ("start: {export: maybe}", "study.yaml: start.export=maybe"),
    ],
)
def test_a_wrong_study_is_refused_by_file_key_and_remedy(tmp_path, change, line):
    valid = {
        "title": "t",
        "text": "t",
        "config": "c.yaml",
        "models": {"y": "softmax"},
        "columns": {"a": "name"},
    }
    file = tmp_path / "study.yaml"
    key = change.partition(":")[0]
    lines = [f"{name}: {json.dumps(value)}" for name, value in valid.items() if name != key]
    file.write_text("\n".join([*lines, change]))
    with pytest.raises(ConfigError) as refused:
        read_study(str(file))
    assert str(file) in str(refused.value)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["far_contxt"], "far_contxt is no study; choose far_context"),
        (["recall", "--only", "flurkas"], "--only flurkas is not in this study; choose flurka"),
        (["recall", "--variants", "5"], "--variants 5 is not in this study"),
        (["recall", "training.stepz=1"], "training.stepz=1 is an unknown key; did you mean steps?"),
        (["far_uptraining", "--seeds", "0", "1"], "names flurka, seed 1 and flurka alike; add {seed}"),
    ],
)
def test_a_wrong_command_is_refused(arguments, line):
    with pytest.raises(UserError, match=re.escape(line)):
        main(arguments)


def test_an_unknown_name_in_a_text_is_refused():
    study = read_study("recall")
    with pytest.raises(
        ConfigError, match=r"recall\.yaml=\{lenght\} cannot be filled in .*; known names: seq_len"
    ):
        study.fill("{lenght}", {"seq_len": 3})


def commands():
    """The commands of the studies in the pages of results and in the documentation, which may span lines."""
    for file in sorted([*ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("docs/*.md")]):
        text = file.read_text().replace("\\\n", " ")
        for command in re.findall(r"python -m benchmarks\.experiments ([^`\n#]*)", text):
            yield pytest.param(command, id=f"{file.stem}: {command[:50]}")


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_pages_name_studies_models_and_keys(command):
    arguments = parse(shlex.split(command))
    if not arguments.list:
        arguments.seeds = (arguments.seeds or [0])[:1]
        assert planned_runs(read_study(arguments.study), arguments)


def test_studies_and_their_models_are_listed():
    assert "far_context: What the far context is worth" in listing(None).splitlines()
    lines = listing("far_context").splitlines()
    assert "local_selected_tile_32" in lines[1]
    assert lines[2] == "variants: 2048, 4096, 8192"
    assert listing("lra_kl_votes").splitlines()[2].startswith("without --only: gmm_rks, gmm_prf, gen")


@pytest.mark.parametrize("length", ["2048", "8192"])
def test_tokens_of_the_far_context_become_steps_at_every_length(length):
    arguments = parse(["far_context", "--variants", length, "--tokens", str(2**20)])
    study = read_study("far_context")
    runs = planned_runs(study, arguments)
    assert [run.name for run in runs] == list(study.models)
    for config in (run.config for run in runs):
        assert config.training.steps == 128
        assert config.training.global_batch_size * config.training.seq_len == 8192
        assert config.model.is_causal
        assert config.run.folder.name.endswith(f"-{length}-0")


def test_a_state_is_a_fraction_of_the_cache_at_the_longest_sequences():
    study, layers, keys, width, blocks = read_study("far_context"), 4, 8192, 4 * 64, 64
    models = (
        make_run(study, name, "8192", 0).config.model
        for name in ("softmax", "local", "flurka", "flurka_best")
    )
    cache, local, *states = (state_size(model, keys) for model in models)
    assert cache == layers * 2 * width * keys
    assert local == layers * 2 * width * blocks
    assert all(cache / state > 60 for state in states)


def test_choosing_layers_read_a_quarter_of_a_sequence():
    study = read_study("far_context")
    for unit in ("tile", "token"):
        for size in (16, 32, 64):
            run = make_run(study, f"local_selected_{unit}_{size}", "2048", 0)
            *windows, chosen = run.config.model.attentions
            assert [layer.selection for layer in windows] == [None] * 3
            assert (chosen.selection.unit, chosen.selection.blocks * size) == (unit, 512)


def test_every_preset_is_trained_as_a_decoder_if_possible():
    study = read_study("short_training")
    assert set(study.models) == {*PRESETS, "one token", "one token, masked", "softmax, masked"}
    for name in study.models:
        config = make_run(study, name, "", 0).config
        attention = Attention.model_validate(config.model.attention.model_dump())
        assert config.training.global_batch_size * config.training.seq_len == 2048
        assert (config.model.kind == "masked_lm") == (
            name.endswith("masked") or attention.mixes_future_tokens is not None
        )
        if config.model.kind == "masked_lm":
            assert config.data.isolate_documents == (attention.mixes_documents is None)
        if name.startswith("one token"):
            continue
        assert config.training.seq_len % (attention.block_size or 1) == 0
        if attention.mechanism in ("skyformer", "nystromformer"):
            sizes = getattr(attention, attention.mechanism).model_dump()
            assert sizes.get("features", sizes.get("landmarks")) < config.training.seq_len
        elif attention.has_position_parameters:
            assert attention.compression.rank < config.training.seq_len


def test_all_encoders_are_in_the_papers_studies():
    encoders = [name for name in PRESETS if not Attention.model_validate(expand_preset(name)).looks_back_only]
    for name in PAPERS:
        assert {"as configured", *encoders} <= set(read_study(name).models)


def test_models_that_a_study_measures_by_default_are_those_with_noise():
    study = read_study("lra_kl_votes")
    runs = planned_runs(study, parse(["lra_kl_votes", "--seeds", "0"]))
    assert [run.name for run in runs] == study.study.only
    redrawn = [
        name
        for name in study.models
        if all(layer.redraws for layer in make_run(study, name, "text", 0).config.model.attentions)
    ]
    assert set(study.study.only) <= set(redrawn)
    runs = planned_runs(study, parse(["lra_kl_votes", "--seeds", "0", "--only", "skyformer"]))
    assert [run.name for run in runs] == ["skyformer"]


def test_a_paper_has_its_numbers_of_samples():
    study = read_study("lra_kl")
    assert make_run(study, "gmm_rks", "text", 2).config.model.attention.feature_map.samples == 128
    for task in ("listops", "text", "retrieval", "image"):
        own, named = (
            make_run(study, name, task, 0).config.model for name in ("as configured", "fastfood_prf")
        )
        assert own.attention == named.attention
    for study in (read_study("lra_skyformer"), read_study("lra_flurka")):
        for task in study.study.variants:
            assert make_run(study, "performer", task, 0).config.model.attention.feature_map.samples == 128
            assert make_run(study, "flurka_rnn", task, 0).config.model.attention.compression.rank == 128


def test_shorter_texts_are_the_same_models_on_the_same_data():
    study = read_study("lra_kl")
    whole, *cut = (
        make_run(study, "gmm_rks", variant, 0).config
        for variant in ("text", "text-1000", "text-2000", "text-3000")
    )
    assert [config.training.seq_len for config in cut] == [1000, 2000, 3000]
    assert all((config.model, config.data) == (whole.model, whole.data) for config in cut)


def test_mixture_keys_of_half_the_heads_have_the_width_of_the_baselines():
    study = read_study("lra_mgk")
    for name in ("softmax-8", "mgk-4", "smgk-1"):
        model = make_run(study, name, "text", 0).config.model
        assert (model.num_heads, model.head_size) == (int(name.rpartition("-")[2]), 32)
    for name in ("mgk-hard-1", "smgk-hard-1", "mgk-soft-1", "smgk-soft-1"):
        mixture = make_run(study, name, "text", 0).config.model.attention.mixture
        assert mixture.kind == ("shifted" if name.startswith("smgk") else "projected")
        assert (mixture.estep == "hard", mixture.m_step) == ("hard" in name, "soft" in name)
    language = read_study("wikitext_mgk")
    shared = make_run(language, "multi-query mgk", "small-4", 0).config.model
    assert (shared.num_heads, shared.kv_heads, shared.attention.keys_at_position) == (4, 1, 2)


def test_no_step_repeats_an_example():
    study = read_study("passkey")
    short, long = (
        planned_runs(study, parse(["passkey", "--only", "local", "--steps", steps]))[0].names["examples"]
        for steps in ("3", "60")
    )
    assert 3 * 8 * 512 / 64 < short < 4 * 8 * 512 / 64 + 100
    assert long > 15 * (short - 100)
    uptraining = make_run(read_study("passkey_uptraining"), "local+convolution", "", 0)
    assert uptraining.names["examples"] > 1300 * 8 * 512 / 64 / 0.98
    assert uptraining.config.training.skip_samples[0] == (0, 1000 * 8)


def student_runs():
    study = read_study("far_uptraining")
    return [make_run(study, model, "", 0) for model in study.models]


def test_students_read_the_same_tokens_after_those_of_the_dense_model():
    from megakernel.checkpoint.trained_run import DENSE
    from megakernel.uptraining.stages import stages
    from megakernel.uptraining.transfer import check_parts_around

    controls = []
    for run in student_runs():
        dense = run.start.config
        plan = stages(run.config, [0, 1], dense.model)
        trained = [stage.config.training.steps for stage in plan if not stage.is_control]
        assert sum(trained) == 120
        assert plan[0].config.training.skip_samples[0] == (0, 1200 * dense.training.global_batch_size)
        assert run.config.init.source == dense.run.folder == Path("runs/far_context/softmax_around-2048-0")
        check_parts_around(run.config.model, dense.model, transfers=len(trained) > 1)
        controls += [run.name for stage in plan if stage.kind == DENSE]
    # One of each page: students of other parts are compared with a dense model of their own machine.
    assert controls == ["flurka", "selected"]


def test_a_finished_up_training_is_reused_only_with_its_configuration(tmp_path):
    run = next(run for run in student_runs() if run.name == "window")
    overrides = [*run.overrides, f"run.root={tmp_path}"]
    folder = tmp_path / "window"
    folder.mkdir()
    config = training_runs.load(run.file, overrides)
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (folder / "uptrain_report.json").write_text('{"window": 32}', encoding="utf-8")
    assert training_runs.uptrain_run(run.file, overrides) == (folder, {"window": 32})
    with pytest.raises(UserError, match=r"optimizer\.beta2"):
        training_runs.uptrain_run(run.file, [*overrides, "optimizer.beta2=0.9"])


STEPS = 200
FALLING = [5.0 - step / 100 for step in range(STEPS)]


@pytest.fixture
def write_finished_run(tmp_path, monkeypatch):
    """A function that writes the files of a finished `megakernel pretrain` and its evaluations, without training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "stdlib").mkdir(parents=True)
    (tmp_path / "data" / "far_context").mkdir(parents=True)

    def no_process(*command):
        raise AssertionError("a finished run is not repeated")

    monkeypatch.setattr(training_runs, "run_megakernel", no_process)
    monkeypatch.setattr(training_runs, "find_checkpoint", lambda folder: SimpleNamespace(step=10**6))

    def write(run, losses, held_out=None, evaluations=(), **step):
        folder = run.config.run.folder
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(run.config))
        step = {"train/grad_norm": 1.0, "train/skipped_steps": 0.0, "throughput/step_time": 0.1, **step}
        first, last = held_out or (losses[0], losses[-1])
        lines = [{"step": 0, "eval/loss": first}]
        lines += [{"step": number, "train/loss": loss, **step} for number, loss in enumerate(losses, start=1)]
        lines[-1]["eval/loss"] = last
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        place = folder / "evaluation" / f"step_{run.config.training.steps}"
        place.mkdir(parents=True)
        for task, result in dict(evaluations).items():
            (place / f"{file_name(run.tasks[task])}.json").write_text(json.dumps(result))
        return folder

    return write


def short_run(name):
    return make_run(read_study("short_training"), name, "", 0)


def test_a_page_is_written_from_finished_runs(write_finished_run, tmp_path):
    for name in ("linear", "softmax, masked"):
        write_finished_run(short_run(name), FALLING)
    command = ["short_training", "--only", "softmax, masked", "linear", "--out", str(tmp_path / "page.md")]
    assert main(command) == 0
    lines = (tmp_path / "page.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert rows == [
        "| `linear` | causal_lm | 4.955 | 3.055 | 5.000 | **3.010** | 0.100 |",
        "| `softmax, masked` | masked_lm | 4.955 | 3.055 | 5.000 | **3.010** | 0.100 |",
    ]
    assert "python -m benchmarks.experiments short_training --only 'softmax, masked' linear" in lines[2]
    assert any(line.startswith("* `softmax, masked`: `model.attention=") for line in lines)


def test_no_page_is_written_if_a_loss_rises(write_finished_run, tmp_path, capsys):
    for name in ("linear", "hedgehog"):
        write_finished_run(short_run(name), FALLING[::-1] if name == "linear" else FALLING)
    assert main(["short_training", "--only", "linear", "hedgehog", "--out", str(tmp_path / "page.md")]) == 1
    assert not (tmp_path / "page.md").exists()
    assert "linear: the training loss did not fall, 3.0550 to 4.9550" in capsys.readouterr().err


def test_a_finished_run_of_another_configuration_is_not_reused(write_finished_run, tmp_path, capsys):
    for name in ("linear", "hedgehog"):
        write_finished_run(short_run(name), FALLING)
    command = ["short_training", "optimizer.lr=1e-3", "--only", "linear", "hedgehog"]
    assert main([*command, "--out", str(tmp_path / "page.md")]) == 1
    error = capsys.readouterr().err
    assert "linear: " in error
    assert "hedgehog: " in error
    assert "optimizer.lr" in error


@pytest.mark.parametrize(
    ("losses", "held_out", "skipped", "reason"),
    [
        ([5.0] * STEPS, None, 0, "the training loss did not fall"),
        (FALLING, (5.5, 5.6), 0, "the held-out loss did not fall, 5.5000 to 5.6000"),
        ([*FALLING[:-1], None], (5.5, 3.0), 0, "not finite (0 steps skipped)"),
        (FALLING, (5.5, None), 0, "not finite"),
        (FALLING, None, 2, "not finite (2 steps skipped)"),
        (FALLING[:-1], None, 0, "is not that of a whole run"),
        (FALLING, None, 0, None),
    ],
    ids=["stays", "held-out rises", "not a number", "held-out not", "skipped", "short", "learned"],
)
def test_a_failed_training_is_reported_by_name(write_finished_run, losses, held_out, skipped, reason):
    run = short_run("linear")
    folder = write_finished_run(run, losses, held_out, **{"train/skipped_steps": skipped})
    reasons = list(learned([StudyResult(run, run.name, run.config, folder, STEPS, {}, {}, 1)]))
    if reason is None:
        assert reasons == []
    else:
        [found] = reasons
        assert found.startswith("linear: ")
        assert reason in found


def far_evaluations(loss):
    buckets = [{"first": 0, "tokens": 100, "loss": loss + 1}, {"first": 512, "tokens": 300, "loss": loss}]
    far = [{"first": 1024, "tokens": 100, "loss": loss - 1, "gain": 0.1}]
    spans = {"first_loss": 4.0, "second_loss": 3.0}
    shuffled = {"buckets": [{"first": 512, "tokens": 1, "gain": 9.0, "loss": 0.0}, *far]}
    by_position = {"loss": loss, "by_position": [*buckets, *far]}
    return {"by_position": by_position, "shuffled": shuffled, "text": spans, "random": spans}


def test_the_page_of_the_far_context_lists_the_lowest_far_loss_first(write_finished_run, tmp_path):
    study = read_study("far_context")
    for name, loss in (("local", 4.0), ("flurka_best", 3.9)):
        run = make_run(study, name, "2048", 0)
        write_finished_run(run, FALLING, None, far_evaluations(loss), **{"throughput/tokens_per_sec": 2000.4})
    assert main(["far_context", "--only", "local", "flurka_best", "--out", str(tmp_path / "page.md")]) == 0
    text = (tmp_path / "page.md").read_text()
    first = "| `flurka_best` | 2,048 | 0 | 3.9000 | 4.1500 | **2.9000** | +0.1000 | 4.000 → 3.000 | 4.000 → 3.000 |"
    assert first in text
    assert text.index(first) < text.index("| `local` | 2,048 | 0 | 4.0000 |")
    assert "| 2,000 |" in text
    assert '* `flurka_best`: `model.attention={"preset": "flurka_decay", "short_convolution": 4,' in text


def test_the_page_of_an_uptraining_has_shares_of_what_the_swap_lost(write_finished_run):
    study = read_study("far_uptraining")
    run = make_run(study, "window", "", 0)
    entry = {"name": "fine-tuning", "loss": 4.1, "beyond": 4.2, "tokens": 5}
    dense = {"name": "dense", "loss": 4.0, "beyond": 4.0}
    swapped = {"name": "swapped, untrained", "loss": 4.5, "beyond": 4.5}
    report = {"dense": dense, "swapped": swapped, "trained_on": {"loss": 4.0}}
    folder = write_finished_run(run, FALLING, None, far_evaluations(4.0))
    result = StudyResult(run, "window", run.config, folder, run.config.training.steps, entry, report, 1)
    start = StudyResult(run, "dense", run.start.config, folder, run.config.training.steps, dense, report, 1)
    lines = page(study, [start, result], "command").splitlines()
    [first, second] = [line for line in lines if line.startswith(("| dense |", "| window |"))]
    assert first.startswith("| dense |  | 4.0000 | 4.2500 | **3.0000** |")
    assert first.endswith("|  | 4,203,520 |")
    assert second.startswith("| window | 4.5000 |")
    share = (2.718281828**0.5 - 2.718281828**0.1) / (2.718281828**0.5 - 1)
    assert f"| **{share:.1%}** | 74,752 |" in second
    assert any(line.startswith("* `window`: `model.attention=") for line in lines)


def test_what_a_result_lacks_is_refused_or_an_empty_cell():
    result = SimpleNamespace(evaluations={"a": {"loss": 1.0, "scores": None}})
    assert TaskNumber(of="a", value_of="loss").value(result, []) == 1.0
    assert TaskNumber(of="a", value_of="scores.f1", optional=True).value(result, []) is None
    with pytest.raises(
        UserError, match="value_of=accuracy is not in the result of a, which has loss, scores"
    ):
        TaskNumber(of="a", value_of="accuracy").value(result, [])


def test_a_number_is_compared_with_the_baseline_of_the_same_variant_and_seed():
    def result(name, seed, loss):
        run = SimpleNamespace(variant="v", seed=seed)
        return SimpleNamespace(key=(name, "v", seed), run=run, evaluations={"a": {"loss": loss}})

    results = [result("base", 0, 3.0), result("base", 1, 5.0), result("mgk", 0, 2.5), result("mgk", 1, 5.25)]
    column = Against(of="a", value_of="loss", baseline="base", format="+.2f")
    values = [column.value(one, results) for one in results]
    assert values == [None, None, -0.5, 0.25], "the baseline has an empty cell"
    assert column.value(results[2], results[1:3]) is None, "the baseline of another seed is no baseline"
    assert column.mean(values[2:]) == "-0.12 ± 0.53"


def test_counted_costs_are_those_of_the_formulas(corpus):
    study = read_study("mgk_short")

    def costs(name):
        run = make_run(study, name, "", 0)
        config = load(run.file, [*run.overrides, f"data.train={corpus}"])
        return StudyResult(run, name, config, None, 0, {}, {}, 1).costs

    (eight, forward, training), (four, less, _), (shifted, more, _) = map(
        costs, ("softmax-8", "softmax-4", "smgk-4")
    )
    assert training == 3 * forward
    # In each of four layers, heads that are together 64 instead of 128 wide, for q, k, v and the output.
    assert eight - four == 4 * 4 * 128 * 64
    # A token sees 257 / 2 keys on average: products with keys and with values.
    assert forward - less == 4 * (2 * 4 * 128 * 64 + 2 * 2 * 257 / 2 * 64)
    # Of each head two shifts, which are 16 wide, and two priors; products with a second key.
    assert shifted - four == 4 * 4 * (2 * 16 + 2)
    assert more - less == 4 * 2 * 257 / 2 * 64


def test_means_over_seeds_have_sample_deviations():
    column = Measure(format=".4f")
    assert column.mean([0.5]) == "0.5000"
    assert column.mean([0.4, 0.5, 0.6]) == "0.5000 ± 0.1000"
    assert column.mean(["`a`"]) == "`a`"
    assert Measure(format=",").mean([400, 1400, 400]) == "400, 1,400"
    assert Measure(format=".1%", bold=True).mean([None]) == ""
    assert Measure().mean([True]) == "yes"
    assert Plain(measure="forward_mflops").mean([0.16613376, 0.16613376]) == "0.166 ± 0.000"


def test_rows_over_seeds_are_one_with_their_number(tmp_path):
    study = read_study("listops_short")
    runs = [make_run(study, "softmax", "", seed) for seed in (0, 1)]
    results = []
    lines = [{"step": step, "throughput/step_time": 0.25, "memory/peak_gib": 1.5} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for run, accuracy in zip(runs, (0.3, 0.4), strict=True):
        result = StudyResult(run, run.name, run.config, tmp_path, 400, {}, {}, 1)
        vars(run)["split"] = "test"
        vars(result)["evaluations"] = {
            "test": {"accuracy": accuracy, "loss": 2.0, "scores": {"matthews": 0.5}, "split": "test"}
        }
        results.append(result)
    [row] = [line for line in page(study, results, "command").splitlines() if line.startswith("| `soft")]
    means = "| `softmax` | 2 | 0.3500 ± 0.0707 | 0.5000 ± 0.0000 | 2.0000 ± 0.0000 | 400 |"
    assert row == f"{means} 0.250 ± 0.000 | 1.50 ± 0.00 |"


def vote_results(variant, *votes):
    for number, (deviation, gain) in enumerate(votes):
        vote = {"deviation": deviation, "gain": gain, "inconsistency": 1.0}
        run = SimpleNamespace(variant=variant, seed=number)
        yield SimpleNamespace(run=run, evaluations={"vote": {"vote": vote}})


def test_correlations_are_over_the_runs_of_each_variant_that_have_both_numbers():
    study = read_study("lra_kl_votes")
    text = [*vote_results("text", (1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (9.0, None))]
    retrieval = [*vote_results("retrieval", (1.0, 4.0), (2.0, 2.0))]
    lines = correlation_lines(study, [*text, *retrieval])
    # Deviations from the means -1, 0, 1 and -1, 1, 0: a product of 1, squares of 2 and 2.
    assert lines[:2] == [
        "* R² of *deviation* and *gain* over 3 runs of text: 0.25",
        "* R² of *deviation* and *gain* over 2 runs of retrieval: none, which takes 3 runs",
    ]
    assert lines[2] == (
        "* R² of *inconsistency* and *gain* over 3 runs of text: none, because one of them is the same everywhere"
    )


class Curve:
    """A result with one curve."""

    def __init__(self, name, curve, seed=0):
        self.run, self._curve = SimpleNamespace(variant="0.1", name=name, seed=seed), curve
        self.name = name

    def curve(self, tag):
        return self._curve


def test_learning_curves_are_written_as_csv_and_drawn(tmp_path):
    results = [Curve("gmm_rks", {0: 0.1, 100: 0.55, 200: 0.95}), Curve("gmm_prf", {0: 0.1})]
    steps = [FirstStep(tag="eval/accuracy", level=level) for level in (0.2, 0.9)]
    assert [step.value(results[0], results) for step in steps] == [100, 200]
    assert [step.value(results[1], results) for step in steps] == ["never", "never"]
    write_curves(results, "eval/accuracy", tmp_path / "page.md")
    lines = (tmp_path / "page.csv").read_text().splitlines()
    assert lines[:3] == ["variant,model,seed,step,value", "0.1,gmm_rks,0,0,0.1", "0.1,gmm_rks,0,100,0.55"]
    assert (tmp_path / "page.png").stat().st_size > 1000


def test_curves_of_several_seeds_are_drawn_as_their_mean_in_a_band_where_all_have_values():
    seeds = [Curve("mgk", {0: 0.1, 100: 0.3, 200: 0.9}), Curve("mgk", {0: 0.3, 100: 0.6}, seed=1)]
    bands = curve_bands([*seeds, Curve("linear", {0: 0.2})], "eval/accuracy", "0.1")
    assert list(bands) == ["mgk", "linear"]
    assert list(bands["mgk"]) == [0, 100]
    assert bands["mgk"][0] == pytest.approx((0.2, 0.1, 0.3))
    assert bands["mgk"][100] == pytest.approx((0.45, 0.3, 0.6))
    assert bands["linear"] == {0: (0.2, 0.2, 0.2)}


def scatter_result(variant, name, seed, accuracy, seconds):
    def curve(tag):
        return {1: 9.0, 2: seconds} if tag == "throughput/step_time" else {1: seconds * 2}

    run, test = SimpleNamespace(variant=variant, seed=seed), {"accuracy": accuracy}
    return SimpleNamespace(run=run, name=name, nproc=2, curve=curve, evaluations={"test": test})


def test_columns_are_drawn_against_each_other_as_means_over_seeds_and_variants(tmp_path, capsys):
    study = read_study("lra_kl")
    results = [
        scatter_result("text", "softmax", 0, 0.5, 1.0),
        scatter_result("text", "softmax", 1, 0.7, 3.0),
        scatter_result("text", "linear", 0, 0.4, 1.0),
        scatter_result("image", "softmax", 0, 0.2, 4.0),
        scatter_result("image", "linear", 0, None, 1.0),
    ]
    # The largest peak is that of the first value of the curve, of two processes.
    assert scatter_points(study, results) == {
        "text": {"softmax": pytest.approx((0.6, 8.0, 2.0)), "linear": pytest.approx((0.4, 4.0, 1.0))},
        "image": {"softmax": pytest.approx((0.2, 16.0, 4.0))},
        "mean of 2": {"softmax": pytest.approx((0.4, 12.0, 3.0))},
    }
    assert capsys.readouterr().err == "linear image is left out of the plot: it lacks a number\n"
    write_scatter(study, results, tmp_path / "page.md")
    assert (tmp_path / "page_scatter.png").stat().st_size > 1000


def test_points_without_an_area_are_drawn_or_left_out_with_a_line(tmp_path, capsys):
    study = read_study("lra_kl")
    results = [scatter_result("text", "softmax", 0, 0.5, 0.0), scatter_result("text", "linear", 0, 0.5, 1.0)]
    assert list(scatter_points(study, results)["text"]) == ["linear"]
    assert capsys.readouterr().err == "softmax text is left out of the plot: 1 / 0 is no area\n"
    by_time = study.study.model_copy(update={"scatter": Scatter(x="accuracy", y="accuracy", size="s/step")})
    study = LoadedStudy(study.name, study.file, by_time, study.columns)
    write_scatter(study, results[:1], tmp_path / "page.md")
    assert (tmp_path / "page_scatter.png").exists()


def test_flops_are_counted_until_a_loss_is_that_of_the_baseline_at_its_end():
    study = read_study("short_flops")

    def result(name, losses, flops):
        run = make_run(study, name, "", 0)
        key = (name, "", 0)
        return SimpleNamespace(
            key=key, run=run, config=run.config, costs=(0, 0, flops), curve=lambda tag: losses
        )

    column = study.columns["TFLOPs"]
    softmax = result("softmax", {0: 5.0, 10: 2.0, 20: 2.5}, 1e6)
    flurka = result("flurka", {0: 5.0, 10: 2.6, 20: 2.4, 30: 2.0}, 5e5)
    linear = result("linear", {0: 5.0, 10: 2.6}, 5e5)
    results = [softmax, flurka, linear]
    # Of 2,048 tokens a step; softmax has reached its last loss before.
    assert column.value(softmax, results) == 10 * 2048 * 1e6 / 1e12
    assert column.value(flurka, results) == 20 * 2048 * 5e5 / 1e12
    assert column.value(linear, results) == "never"
    assert column.value(flurka, [flurka, linear]) is None


def test_buckets_without_a_match_are_an_empty_cell():
    result = SimpleNamespace(evaluations={"a": {"by_position": [{"first": 0, "tokens": 1, "loss": 1.0}]}})
    assert Buckets(of="a", start=1024).value(result, []) is None


def run_folder(folder, kept, **tags):
    """Write metrics.jsonl and empty checkpoint folders."""
    lines = [
        {"step": step, f"eval/{tag}": value} for tag, values in tags.items() for step, value in values.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in kept:
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return folder


def test_the_best_step_has_a_kept_checkpoint(tmp_path):
    accuracy = {10: 0.9, 20: 0.5, 30: 0.7, 40: 0.7}
    assert training_runs.best_step(run_folder(tmp_path, [20, 30, 40], accuracy=accuracy)) == 40


def test_without_accuracy_the_best_step_has_the_lowest_loss(tmp_path):
    assert training_runs.best_step(run_folder(tmp_path, [10, 20], loss={10: 1.0, 20: 2.0})) == 10


def test_every_measure_explains_itself():
    assert all(measure.__doc__ for measure in MEASURES.values())
