"""A dense run becomes a FLuRKA model: every stage, every interruption, on layouts that share the model."""

import json
import shutil

import pytest

from data_pipeline import tokenizers
from launch.training import providers
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import load
from megakernel.training.trainer import Trainer
from megakernel.uptraining.identity import preflight
from megakernel.uptraining.report import recovered
from megakernel.uptraining.validation import Validation
from tests.distributed.processes import RankFailedError, cpu_mesh, run_ranks
from tests.distributed.training_run import killed_at, layout, metrics, pretrain_here, scalars, train
from tests.tiers import tiered

DENSE = """
run: {{root: {folder}, name: dense, seed: 7}}
model:
  num_layers: 2
  hidden_size: 64
  num_heads: 4
  num_kv_heads: 2
  attention: softmax
data: {{train: {corpus}, num_workers: 0}}
parallel: {{zero_stage: 0}}
training:
  steps: 40
  seq_len: 64
  global_batch_size: 8
  micro_batch_size: 4
  dtype: float32
  log_every: 1
  eval_samples: 8
optimizer: {{lr: 3e-3}}
schedule: {{warmup_steps: 5}}
"""

STUDENT = """
extends: dense.yaml
run: {{name: up}}
init: {{from: {folder}/dense}}
model:
  attention: {{preset: flurka, compression: {{block_size: 16, rank: 4}}}}
training: {{steps: 20}}
optimizer: {{lr: 1e-3, mechanism_lr: 1e-2}}
checkpoint: {{every: 3}}
"""

STAGES = """
extends: student.yaml
init: {{moments: {folder}/moments}}
uptrain:
  transfer: {{steps: 6, lr: 0.02, rows: 4, cross_entropy: 0.1}}
  alpha: 0.3
  anneal: 0.2
  near_dropout: 0.5
  layers: {{keep: 1}}
  length: {{steps: 4, seq_len: 128, rope_scaling: {{kind: ntk, factor: 2.0}}}}
  from_scratch: true
  train_dense: true
"""

TRAINED_ON = "dense, trained on as many tokens"
NAMES = ["1-transfer", "2-base", "3-rank8", "4-main", "5-length", "6-scratch", "7-dense"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, corpus):
    """A folder with a dense run, and configurations that start from it."""
    folder = tmp_path_factory.mktemp("uptraining")
    (folder / "dense.yaml").write_text(DENSE.format(folder=folder, corpus=corpus))
    (folder / "student.yaml").write_text(STUDENT.format(folder=folder))
    (folder / "stages.yaml").write_text(STAGES.format(folder=folder))
    train(folder / "dense.yaml", 1)
    shutil.copytree(folder / "dense", folder / "moments")
    return folder


@pytest.fixture(scope="module")
def finished(place):
    """An up-training that nothing disturbed."""
    uptrain(place / "stages.yaml", 1)
    return place / "up"


def uptrain(config, world_size, *overrides):
    statuses = run_ranks(pretrain_here, world_size, config, overrides, timeout=280.0)
    assert set(statuses) == {0}, statuses


def test_every_stage_is_a_run_of_its_own(finished):
    assert sorted(path.parent.name for path in finished.glob("*/config.yaml")) == NAMES
    steps = [metrics(finished / name)[-1]["step"] for name in NAMES]
    assert steps == [6, 6, 4, 10, 4, 26, 26]


def test_the_transfer_brings_each_layer_nearer_to_the_dense_one(finished):
    lines = metrics(finished / "1-transfer")
    tags = [tag for tag in lines[-1] if tag.startswith("transfer/error/")]
    assert len(tags) == 2 * 4  # of every head
    assert all(lines[-1][tag] < lines[1][tag] for tag in tags)
    assert scalars(lines, "train/loss")[-1] < scalars(lines, "train/loss")[0]


def test_the_layer_of_the_largest_error_stays_softmax(finished):
    last = metrics(finished / "1-transfer")[-1]
    errors = [sum(last[f"transfer/error/layer_{layer}/head_{head}"] for head in range(4)) for layer in (0, 1)]
    worst = errors.index(max(errors))
    assert json.loads((finished / "kept_layers.json").read_text()) == [worst]
    model = load(finished / "4-main/config.yaml").model
    assert [model.layer_attention(layer).is_full_softmax for layer in (0, 1)] == [worst == 0, worst == 1]


def test_a_stage_goes_on_where_the_one_before_ended(finished):
    """What a stage measures before its first step is what the one before measured after its last."""
    base, rank, main = (metrics(finished / name) for name in NAMES[1:4])
    # Landmarks merge between them: the loss may move, and not far.
    for before, after in ((base, rank), (rank, main)):
        ended, began = scalars(before, "eval/loss")[-1], scalars(after, "eval/loss")[0]
        assert abs(began - ended) < 0.1


def test_the_report_adds_up(finished):
    report = json.loads((finished / "uptrain_report.json").read_text())
    dense, swapped = report["dense"]["loss"], report["swapped"]["loss"]
    assert dense == pytest.approx(scalars(metrics(finished.parent / "dense"), "eval/loss")[-1], abs=1e-5)
    assert report["identity"] == pytest.approx({"tokens": 64, "student": dense, "dense": dense}, abs=1e-5)
    rows = {row["name"]: row for row in (*report["stages"], *report["ablations"])}
    main = rows["distillation"]
    assert main["loss"] == pytest.approx(scalars(metrics(finished / "4-main"), "eval/loss")[-1], abs=1e-5)
    assert main["loss"] < swapped
    assert report["recovered"]["distillation"] == recovered(swapped, main["loss"], dense)
    assert main["tokens"] == (6 + 20) * 8 * 64
    assert rows["from scratch on as many tokens"]["tokens"] == main["tokens"]
    assert rows["from scratch on as many tokens"]["loss"] > main["loss"]
    assert rows[TRAINED_ON]["tokens"] == main["tokens"]
    trained_on = scalars(metrics(finished / "7-dense"), "eval/loss")
    assert trained_on[0] == pytest.approx(dense, abs=1e-5)  # before its first step it is the dense model
    assert rows[TRAINED_ON]["loss"] == pytest.approx(trained_on[-1], abs=1e-5)
    # Which is better is chance in so short a training.
    assert abs(rows[TRAINED_ON]["loss"] - rows[f"{TRAINED_ON}, sliding window"]["loss"]) > 1e-5
    text = (finished / "uptrain_report.md").read_text()
    for name in (*rows, "swapped, untrained", "rank correlation", "far mass"):
        assert name in text


def test_the_swapped_model_of_a_hybrid_keeps_its_layers(finished):
    told = json.loads((finished / "uptrain_report.json").read_text())["swapped"]["loss"]
    found = run_ranks(loss_of, 1, finished / "4-main/config.yaml", finished.parent / "dense")[0]
    assert told == pytest.approx(found, abs=1e-6)
    before = json.loads((finished / "before.json").read_text())["found"]
    assert told != pytest.approx(before["swapped"][0], abs=1e-4)


def loss_of(config, source, *overrides):
    """A configuration's model with the weights of another run, on its validation samples."""
    run = load(config, overrides)
    with cpu_mesh() as mesh:
        validation = Validation(run, mesh)
        model = validation.model(run.model, WeightSource.find("init.from", source))
        return validation.losses(model, 0)[0]


def test_a_student_without_a_near_window_has_no_sliding_window_beside_it(place):
    found = run_ranks(preflight_of, 1, place / "student.yaml", "model.attention=hedgehog")[0]
    assert found.sliding is None
    assert found.dense[1] == found.dense[0] == pytest.approx(found.identity.student, abs=1e-5)


def preflight_of(config, *overrides):
    run = load(config, overrides)
    with cpu_mesh() as mesh:
        source = WeightSource.find("init.from", run.init.source)
        return preflight(Validation(run, mesh), source, run.model)


KILLED = [
    "preflight of",
    "stage 1-transfer",
    "step 4/6",
    "stage 2-base",
    "step 5/6",
    "stage 3-rank8",
    "stage 4-main",
]
KILLED += ["step  8/10", "stage 5-length", "step 2/4", "stage 6-scratch", "stage 7-dense"]
"""Lines of the console after which one start after another is killed: between all stages and inside most."""


@pytest.mark.second
def test_killed_between_and_inside_stages_it_ends_the_same(place, finished):
    for line in KILLED:
        # A start that never prints the line comes to its end, and that fails here.
        with pytest.raises(RankFailedError, match="exit status -9"):
            run_ranks(killed_at, 1, line, place / "stages.yaml", ("run.name=killed",))
    uptrain(place / "stages.yaml", 1, "run.name=killed")
    for name in NAMES:
        for tag in ("train/loss", "train/grad_norm", "eval/loss"):
            left, right = (scalars(metrics(place / run / name), tag) for run in ("killed", "up"))
            assert left == right, (name, tag)


LAYOUTS = ["tp2", "tp2 sequence parallel", "cp2", "dp2 zero 2 loss chunks", "pp2 zero 1"]
OBJECTIVES = {
    "distill": "objective.temperature=2.0",
    "transfer": "optimizer.trained=mechanism objective.rows=4 objective.cross_entropy=0.1",
    "labels": "optimizer.trained=lora optimizer.lora.rank=2",
}


@pytest.fixture(scope="module")
def one_process(place):
    return {kind: losses(place, kind, "one process") for kind in OBJECTIVES}


def losses(place, kind, ranks, *drawn):
    name = "-".join([kind, *ranks.split(), *drawn]).replace("=", "-")
    overrides = [f"run.name={name}", "training.steps=3", f"objective.kind={kind}"]
    overrides += [f"objective.teacher={place}/dense"] if kind != "labels" else []
    overrides += [*OBJECTIVES[kind].split(), *drawn]
    lines = train(place / "student.yaml", *layout(ranks), *overrides)
    return [scalars(lines, tag) for tag in ("train/loss", "train/grad_norm", "eval/loss")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("kind", list(OBJECTIVES))
def test_layouts_learn_alike(kind, ranks, place, one_process):
    found = losses(place, kind, ranks)
    for ours, expected in zip(found, one_process[kind], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("tied", tiered(["true", "false"], ["true"]))
def test_a_teacher_stands_beside_weights_that_zero_3_cuts(tied, place):
    drawn = (f"model.tie_embeddings={tied}", "init.from=null")
    expected = losses(place, "distill", "one process", *drawn)
    found = losses(place, "distill", "dp2 zero 3 loss chunks", *drawn)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("ranks", tiered(["tp2", "pp2 zero 1", "dp2 zero 2 loss chunks"], ["pp2 zero 1"]))
def test_a_distillation_shows_what_its_loss_is_made_of(ranks, place):
    overrides = ["objective.kind=distill", f"objective.teacher={place}/dense", "training.steps=2"]
    overrides += ["objective.kl=0.5", "objective.temperature=2.0", f"run.name=parts-{ranks[:3]}"]
    lines = train(place / "student.yaml", *layout(ranks), *overrides)
    tags = "train/loss", "train/cross_entropy", "train/divergence"
    loss, cross_entropy, divergence = (scalars(lines, tag) for tag in tags)
    assert len(divergence) == 2
    assert min(divergence) > 0
    summed = [ours + 0.5 * 4 * theirs for ours, theirs in zip(cross_entropy, divergence, strict=True)]
    assert loss == pytest.approx(summed, rel=1e-5)


@pytest.fixture(scope="module")
def larger(place):
    """A dense run of more layers, heads and numbers than the student's source."""
    sizes = ("model.num_layers=3", "model.hidden_size=96", "model.num_heads=6", "training.steps=20")
    train(place / "dense.yaml", 1, "run.name=larger", *sizes)
    return place / "larger"


def learned_from(teacher, place, ranks):
    options = [
        "objective.kind=distill",
        f"objective.teacher={teacher}",
        "training.steps=8",
        "optimizer.lr=0.003",
    ]
    name = f"run.name=larger-{ranks.replace(' ', '-')}"
    return train(place / "student.yaml", *layout(ranks), *options, name)


@pytest.mark.second
@pytest.mark.parametrize("ranks", ["tp2 sequence parallel", "cp2 dp2 zero 2", "pp2"])
def test_a_teacher_may_be_larger_than_the_students_source(ranks, larger, place):
    alone = learned_from(larger, place, "one process")
    assert scalars(alone, "train/divergence")[-1] < scalars(alone, "train/divergence")[0]
    for tag in ("train/loss", "train/divergence", "eval/loss"):
        assert scalars(learned_from(larger, place, ranks), tag) == pytest.approx(
            scalars(alone, tag), rel=1e-4
        ), tag


@pytest.mark.second
def test_the_stages_learn_from_a_larger_teacher_and_refuse_one_that_is_not_there(larger, place):
    wanted = ("run.name=from_larger", "training.steps=4")
    uptrain(place / "student.yaml", 1, *wanted, f"uptrain={{distill: {{teacher: {larger}}}}}")
    (main,) = (place / "from_larger").glob("*-main/config.yaml")
    assert load(main).objective.teacher == larger
    assert scalars(metrics(main.parent), "train/divergence")
    with pytest.raises(RankFailedError, match=r"uptrain\.distill\.teacher=.*nowhere is no run"):
        uptrain(
            place / "student.yaml", 1, "run.name=none", f"uptrain={{distill: {{teacher: {place}/nowhere}}}}"
        )


@pytest.mark.second
def test_a_teacher_whose_heads_tensor_ranks_cannot_share_is_refused(place):
    train(
        place / "dense.yaml",
        1,
        "run.name=odd",
        "model.num_heads=1",
        "model.num_kv_heads=1",
        "training.steps=1",
    )
    with pytest.raises(RankFailedError, match=r"has 2 layers of 1 key heads, which parallel\.pipeline=1 and"):
        learned_from(place / "odd", place, "tp2")


def test_low_rank_updates_are_all_that_moves_and_fold_into_what_they_update(place):
    overrides = ["run.name=lora", "optimizer.trained=lora", "training.steps=12", "optimizer.lr=0.003"]
    train(place / "student.yaml", 1, *overrides)
    loss, moved = run_ranks(folded, 1, place / "student.yaml", overrides)[0]
    ended = scalars(metrics(place / "lora"), "eval/loss")
    assert loss == pytest.approx(ended[-1], abs=1e-5)
    assert ended[-1] != ended[0]
    assert moved == {"qkv.weight", "output.weight"}


def folded(config, overrides):
    """The loss of the run's weights without updates beside them, and which weights they do not share with the start."""
    with cpu_mesh() as mesh:
        validation = Validation(load(config, overrides), mesh)
        run, dense = (WeightSource.find("init.from", config.parent / name) for name in ("lora", "dense"))
        model = validation.model(run.model(), run)
        before = dense.tensors(run.model())
        moved = {
            name.split(".self_attention.")[-1]
            for name, weight in model.named_parameters()
            if name in before.names and not weight.equal(before.read(name, ["fp32"])["fp32"])
        }
        return validation.losses(model, 0)[0], moved


PARTS = {"short_convolution": 4, "output_norm": True, "output_gate": "silu"}


def with_parts(place, *overrides, preset="flurka", parts=PARTS):
    """Overrides of a student with these parts around its attention, which starts from the run `around`."""
    blocks = {} if preset == "softmax" else {"compression": {"block_size": 16, "rank": 4}}
    attention = json.dumps({"preset": preset, **blocks, **parts})
    return [f"init.from={place}/around", f"model.attention={attention}", "training.steps=2", *overrides]


@pytest.fixture(scope="module")
def around(place):
    """A dense run with parts around its attention."""
    _, *overrides = with_parts(place, "run.name=around", "optimizer.lr=0.02", preset="softmax")
    train(place / "dense.yaml", 1, *overrides, "schedule.warmup_steps=0")
    return place / "around"


def test_a_student_takes_over_what_its_dense_model_has_around_attention(place, around):
    uptrain(
        place / "student.yaml",
        1,
        *with_parts(place, "run.name=taken"),
        "uptrain={transfer: {steps: 3, lr: 0.02}}",
    )
    moved = run_ranks(moved_between, 1, around, place / "taken/1-transfer")[0]
    assert moved
    assert all(".core." in name for name in moved), "an attention transfer leaves the parts as they are"
    assert any(
        "output_gate" in name for name in run_ranks(moved_between, 1, around, place / "taken/2-main")[0]
    )
    report = json.loads((place / "taken/uptrain_report.json").read_text())
    assert report["identity"]["student"] == pytest.approx(report["identity"]["dense"], abs=1e-5)


def moved_between(before, after):
    """Weights that are new in a run, or have another value than in an earlier one."""
    sources = (WeightSource.find("init.from", folder) for folder in (before, after))
    old, new = (source.tensors(source.model()) for source in sources)
    names = (name for name in new.names if name.startswith(("1.", "2.")))
    return {
        name
        for name in names
        if name not in old.names
        or not new.read(name, ["fp32"])["fp32"].equal(old.read(name, ["fp32"])["fp32"])
    }


def test_a_student_may_have_more_around_attention_where_all_of_the_layer_is_trained(place):
    overrides = with_parts(place, f"init.from={place}/dense", "run.name=more")
    uptrain(place / "student.yaml", 1, *overrides, "uptrain={}")
    with pytest.raises(RankFailedError, match=r"layer 0 has output_gate, which the dense model lacks"):
        uptrain(place / "student.yaml", 1, *overrides, "run.name=refused", "uptrain={transfer: {steps: 3}}")
    alone = ["objective.kind=transfer", f"objective.teacher={place}/dense", "optimizer.trained=mechanism"]
    with pytest.raises(RankFailedError, match=r"layer 0 has output_gate, which the dense model lacks"):
        train(place / "student.yaml", 1, *overrides, *alone, "run.name=refused-alone")
    assert not (place / "refused").exists()


def test_a_student_without_what_its_dense_model_has_around_attention_is_refused(place, around):
    fewer = with_parts(place, "run.name=refused", parts={"short_convolution": 3, "output_norm": True})
    with pytest.raises(
        RankFailedError, match=r"layer 0 has short_convolution=3 and the dense model 4; set what"
    ):
        uptrain(place / "student.yaml", 1, *fewer, "uptrain={}")
    assert not (place / "refused").exists()


def test_a_teacher_has_the_tensors_of_what_is_not_trained_also_on_going_on(place):
    overrides = ["optimizer.trained=lora", "objective.kind=distill", f"objective.teacher={place}/dense"]
    for model in run_ranks(shared, 1, place / "student.yaml", [*overrides, "run.name=shares"])[0]:
        trained = {name for name, (_, trains) in model.items() if trains}
        assert {name.split(".")[-2] for name in trained} >= {"core", "value_update", "output_update"}
        assert {name for name, (shares, _) in model.items() if shares} == model.keys() - trained


def shared(config, overrides):
    """Of a start and of one that goes on: name -> whether the teacher has its tensor, and whether it is trained."""
    found = []
    with cpu_mesh() as mesh:
        for steps in (1, 2):
            trainer = Trainer(load(config, [*overrides, f"training.steps={steps}"]), mesh, providers())
            trainer.run()
            student = trainer.engine.engine.module
            places = {name: x.data_ptr() for name, x in student.objective.teacher.model.named_parameters()}
            found.append(
                {
                    name: (places.get(name) == x.data_ptr(), x.requires_grad)
                    for name, x in student.named_parameters()
                }
            )
    return found


@pytest.mark.parametrize("key", ["init.from", "init.moments"])
def test_what_is_not_there_is_refused_before_a_folder_is_made(key, place):
    with pytest.raises(RankFailedError, match=f"{key}=nowhere is no run"):
        uptrain(place / "stages.yaml", 1, "run.name=refused", f"{key}=nowhere")
    assert not (place / "refused").exists()


def test_texts_shorter_than_the_longest_sequences_are_refused_before_a_folder_is_made(place):
    length = "uptrain.length={steps: 1, seq_len: 1000000}"
    with pytest.raises(
        RankFailedError, match=r"in its validation split, one sample takes uptrain.length.seq_len"
    ):
        uptrain(place / "stages.yaml", 1, "run.name=refused", length)
    assert not (place / "refused").exists()


def test_a_finished_one_measures_other_samples_and_needs_no_moments(place, finished):
    folder = shutil.copytree(finished, finished.with_name("again"))
    moments = (place / "moments").rename(place / "gone")
    try:
        changes = ("training.eval_samples=3", "logging.tensorboard=false")
        uptrain(place / "stages.yaml", 1, "run.name=again", *changes)
    finally:
        moments.rename(place / "moments")
    events = [[file.name for file in (run / "tensorboard").iterdir()] for run in (finished, folder)]
    assert len(events[0]) == 1  # the report's
    assert events[0] == events[1]
    report = json.loads((folder / "uptrain_report.json").read_text())
    found = run_ranks(loss_of, 1, place / "dense.yaml", place / "dense", "training.eval_samples=3")[0]
    assert found != json.loads((finished / "uptrain_report.json").read_text())["dense"]["loss"]
    assert report["dense"]["loss"] == pytest.approx(found, abs=1e-6)
    assert report["identity"]["dense"] == pytest.approx(found, abs=1e-6)


def test_another_tokenizer_is_refused(place):
    other = shutil.copytree(place / "dense", place / "other")
    shutil.rmtree(other / "tokenizer")
    tokenizers.train_bpe(["some words, some more words"] * 9, 270).save(other / "tokenizer")
    with pytest.raises(RankFailedError, match=r"init.from=\S+/other has another tokenizer than data.train="):
        uptrain(place / "stages.yaml", 1, "run.name=refused", f"init.from={other}")
    assert not (place / "refused").exists()
    teacher = ["objective.kind=distill", f"objective.teacher={other}"]
    with pytest.raises(RankFailedError, match=r"objective.teacher=\S+/other has another tokenizer than"):
        train(place / "student.yaml", 1, "run.name=another-teacher", *teacher)


def test_what_preflight_refuses_can_be_mended_in_the_same_folder(place):
    with pytest.raises(
        RankFailedError, match=r"give it the dense model's section \(model.rope_base=10000.0\)"
    ):
        uptrain(place / "student.yaml", 1, "run.name=mended", "uptrain={}", "model.rope_base=500")
    assert {path.name for path in (place / "mended").iterdir()} == {"lock"}
    uptrain(place / "student.yaml", 1, "run.name=mended", "uptrain={}", "training.steps=2")


def test_a_stop_file_in_its_folder_ends_the_stage_that_it_is_in(place):
    stopped = place / "stopped"
    stopped.mkdir()
    (stopped / "STOP").touch()
    assert run_ranks(pretrain_here, 1, place / "stages.yaml", ("run.name=stopped",)) == [143]
    assert not (stopped / "STOP").exists()
    assert [path.name for path in stopped.glob("*/checkpoints/step_*")] == ["step_1"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("uptrain.alpha=0.2", r"uptrain\.alpha=0\.2 was 0\.3 when the run began"),
        ("init.moments=null", r"init\.moments=None was '\S+/moments' when the run began"),
    ],
)
def test_another_configuration_does_not_go_on_in_its_folder(change, reason, place, finished):
    with pytest.raises(RankFailedError, match=reason):
        run_ranks(pretrain_here, 1, place / "stages.yaml", (change,))
