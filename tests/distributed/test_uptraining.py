"""Up-training of a dense run to a FLuRKA model: every stage, interruptions, and layouts."""

import json
import shutil
from functools import cache
from itertools import product

import pytest

from data_pipeline import tokenizers
from launch.training import providers
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import load
from megakernel.training.run_folder import EVENT_FILES
from megakernel.training.trainer import Trainer
from megakernel.uptraining.identity import preflight
from megakernel.uptraining.report import recovered
from megakernel.uptraining.validation import Validation
from tests.distributed.processes import RankFailedError, cpu_mesh, run_ranks
from tests.distributed.training_run import (
    layout,
    metrics,
    pretrain_in_this_rank,
    pretrain_killed_at_line,
    scalars,
    train,
)
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
def root(tmp_path_factory, corpus):
    """A folder with a dense run, and configurations that start from it."""
    folder = tmp_path_factory.mktemp("uptraining")
    (folder / "dense.yaml").write_text(DENSE.format(folder=folder, corpus=corpus))
    (folder / "student.yaml").write_text(STUDENT.format(folder=folder))
    (folder / "stages.yaml").write_text(STAGES.format(folder=folder))
    train(folder / "dense.yaml", 1)
    shutil.copytree(folder / "dense", folder / "moments")
    return folder


@pytest.fixture(scope="module")
def finished(root):
    """The folder of an up-training that was not interrupted."""
    uptrain(root / "stages.yaml", 1)
    return root / "up"


def uptrain(config, world_size, *overrides):
    statuses = run_ranks(pretrain_in_this_rank, world_size, config, overrides, timeout=280.0)
    assert set(statuses) == {0}, statuses


def test_every_stage_has_a_run_folder(finished):
    assert sorted(path.parent.name for path in finished.glob("*/config.yaml")) == NAMES
    steps = [metrics(finished / name)[-1]["step"] for name in NAMES]
    assert steps == [6, 6, 4, 10, 4, 26, 26]


def test_attention_transfer_lowers_the_error_of_every_head(finished):
    lines = metrics(finished / "1-transfer")
    tags = [tag for tag in lines[-1] if tag.startswith("transfer/error/")]
    assert len(tags) == 2 * 4  # layers x heads
    assert all(lines[-1][tag] < lines[1][tag] for tag in tags)
    assert scalars(lines, "train/loss")[-1] < scalars(lines, "train/loss")[0]


def test_the_layer_with_the_largest_transfer_error_stays_softmax(finished):
    last = metrics(finished / "1-transfer")[-1]
    errors = [sum(last[f"transfer/error/layer_{layer}/head_{head}"] for head in range(4)) for layer in (0, 1)]
    worst = errors.index(max(errors))
    assert json.loads((finished / "kept_layers.json").read_text()) == [worst]
    model = load(finished / "4-main/config.yaml").model
    assert [model.layer_attention(layer).is_plain_softmax for layer in (0, 1)] == [worst == 0, worst == 1]


def test_a_stage_starts_from_the_result_of_the_previous_one(finished):
    """The loss before a stage's first step is close to the loss after the last step of the previous stage."""
    base, rank, main = (metrics(finished / name) for name in NAMES[1:4])
    # Landmarks merge between the stages, which changes the loss a little.
    for before, after in ((base, rank), (rank, main)):
        ended, began = scalars(before, "eval/loss")[-1], scalars(after, "eval/loss")[0]
        assert abs(began - ended) < 0.1


def test_the_report_agrees_with_the_metrics_of_the_stages(finished):
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
    assert trained_on[0] == pytest.approx(dense, abs=1e-5)  # before its first step it equals the dense model
    assert rows[TRAINED_ON]["loss"] == pytest.approx(trained_on[-1], abs=1e-5)
    # Which of them is better is chance in such a short training.
    assert abs(rows[TRAINED_ON]["loss"] - rows[f"{TRAINED_ON}, sliding window"]["loss"]) > 1e-5
    assert "<svg" in (finished / "uptrain_report.html").read_text()
    text = (finished / "uptrain_report.md").read_text()
    for name in (*rows, "swapped, untrained", "rank correlation", "far mass"):
        assert name in text


def test_the_swapped_baseline_of_a_hybrid_keeps_its_softmax_layers(finished):
    reported = json.loads((finished / "uptrain_report.json").read_text())["swapped"]["loss"]
    expected = run_ranks(validation_loss, 1, finished / "4-main/config.yaml", finished.parent / "dense")[0]
    assert reported == pytest.approx(expected, abs=1e-6)
    before = json.loads((finished / "before.json").read_text())["found"]
    assert reported != pytest.approx(before["swapped"][0], abs=1e-4)


def validation_loss(config, source, *overrides):
    """The validation loss of a configuration's model with the weights of another run."""
    run = load(config, overrides)
    with cpu_mesh() as mesh:
        validation = Validation(run, mesh)
        model = validation.model(run.model, WeightSource.find("init.from", source))
        return validation.losses(model, 0)[0]


def test_a_student_without_a_near_window_has_no_sliding_window_baseline(root):
    result = run_ranks(preflight_of, 1, root / "student.yaml", "model.attention=hedgehog")[0]
    assert result.sliding is None
    assert result.dense[1] == result.dense[0] == pytest.approx(result.identity.student, abs=1e-5)


def preflight_of(config, *overrides):
    run = load(config, overrides)
    with cpu_mesh() as mesh:
        source = WeightSource.find("init.from", run.init.source)
        return preflight(Validation(run, mesh), source, run.model)


KILL_LINES = [
    "preflight of",
    "stage 1-transfer",
    "step 4/6",
    "stage 2-base",
    "step 5/6",
    "stage 3-rank8",
    "stage 4-main",
]
KILL_LINES += ["step  8/10", "stage 5-length", "step 2/4", "stage 6-scratch", "stage 7-dense"]
"""Console lines at which one start after another is killed: between all stages and inside most."""


@pytest.mark.second
def test_an_uptraining_killed_between_and_inside_stages_ends_bit_identically(root, finished):
    for line in KILL_LINES:
        # A start that never prints the line finishes, which fails the test here.
        with pytest.raises(RankFailedError, match="exit status -9"):
            run_ranks(pretrain_killed_at_line, 1, line, root / "stages.yaml", ("run.name=killed",))
    uptrain(root / "stages.yaml", 1, "run.name=killed")
    for name in NAMES:
        for tag in ("train/loss", "train/grad_norm", "eval/loss"):
            left, right = (scalars(metrics(root / run / name), tag) for run in ("killed", "up"))
            assert left == right, (name, tag)


LAYOUTS = ["tp2", "tp2 sequence parallel", "tp4", "cp2", "dp2 zero 2 loss chunks", "pp2 zero 1"]
"""Two ranks of tp4 hold the same key head."""

OBJECTIVES = {
    "distill": "objective.temperature=2.0",
    "transfer": "optimizer.trained=mechanism objective.rows=4 objective.cross_entropy=0.1",
    "labels": "optimizer.trained=lora optimizer.lora.rank=2 optimizer.lora.targets=[query,key,value,output,up]",
}
CASES = list(product(LAYOUTS, OBJECTIVES))


@pytest.fixture(scope="module")
def one_process(root):
    """Kind -> its losses in one process."""
    return cache(lambda kind: losses(root, kind, "one process"))


def losses(root, kind, ranks, *extra):
    name = "-".join([kind, *ranks.split(), *extra]).replace("=", "-")
    overrides = [f"run.name={name}", "training.steps=3", f"objective.kind={kind}"]
    overrides += [f"objective.teacher={root}/dense"] if kind != "labels" else []
    overrides += [*OBJECTIVES[kind].split(), *extra]
    lines = train(root / "student.yaml", *layout(ranks), *overrides)
    return [scalars(lines, tag) for tag in ("train/loss", "train/grad_norm", "eval/loss")]


@pytest.mark.parametrize(("ranks", "kind"), tiered(CASES, [("pp2 zero 1", "distill")]))
def test_every_layout_learns_the_same_with_every_objective(kind, ranks, root, one_process):
    curves = losses(root, kind, ranks)
    for actual, expected in zip(curves, one_process(kind), strict=True):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.second
@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_teacher_works_with_a_student_sharded_by_zero_3(tied, root):
    extra = (f"model.tie_embeddings={tied}", "init.from=null")
    expected = losses(root, "distill", "one process", *extra)
    curves = losses(root, "distill", "dp2 zero 3 loss chunks", *extra)
    for actual, wanted in zip(curves, expected, strict=True):
        assert actual == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("ranks", tiered(["tp2", "pp2 zero 1", "dp2 zero 2 loss chunks"], ["pp2 zero 1"]))
def test_distillation_logs_the_parts_of_its_loss(ranks, root):
    overrides = ["objective.kind=distill", f"objective.teacher={root}/dense", "training.steps=2"]
    overrides += ["objective.kl=0.5", "objective.temperature=2.0", f"run.name=parts-{ranks[:3]}"]
    lines = train(root / "student.yaml", *layout(ranks), *overrides)
    tags = "train/loss", "train/cross_entropy", "train/divergence"
    loss, cross_entropy, divergence = (scalars(lines, tag) for tag in tags)
    assert len(divergence) == 2
    assert min(divergence) > 0
    summed = [ce + 0.5 * 4 * kl for ce, kl in zip(cross_entropy, divergence, strict=True)]
    assert loss == pytest.approx(summed, rel=1e-5)


def test_a_teacher_without_a_weight_in_the_loss_is_refused(root):
    keys = ["objective.kind=distill", f"objective.teacher={root}/dense", "objective.kl=0", "run.name=kl0"]
    with pytest.raises(RankFailedError, match=r"objective.kl=0 leaves the teacher nothing to teach; take"):
        train(root / "student.yaml", 1, *keys)


@pytest.fixture(scope="module")
def larger_teacher(root):
    """A dense run with more layers, heads and hidden units than the student's source."""
    sizes = ("model.num_layers=3", "model.hidden_size=96", "model.num_heads=6", "training.steps=20")
    train(root / "dense.yaml", 1, "run.name=larger", *sizes)
    return root / "larger"


def distill_from(teacher, root, ranks):
    options = [
        "objective.kind=distill",
        f"objective.teacher={teacher}",
        "training.steps=8",
        "optimizer.lr=0.003",
    ]
    name = f"run.name=larger-{ranks.replace(' ', '-')}"
    return train(root / "student.yaml", *layout(ranks), *options, name)


@pytest.mark.second
def test_a_teacher_may_be_larger_than_the_student(larger_teacher, root):
    alone = distill_from(larger_teacher, root, "one process")
    assert scalars(alone, "train/divergence")[-1] < scalars(alone, "train/divergence")[0]
    for ranks in ("tp2 sequence parallel", "cp2 dp2 zero 2", "pp2"):
        lines = distill_from(larger_teacher, root, ranks)
        for tag in ("train/loss", "train/divergence", "eval/loss"):
            assert scalars(lines, tag) == pytest.approx(scalars(alone, tag), rel=1e-4), (ranks, tag)


@pytest.mark.second
def test_the_stages_learn_from_a_larger_teacher_and_refuse_a_missing_one(larger_teacher, root):
    options = ("run.name=from_larger", "training.steps=4")
    uptrain(root / "student.yaml", 1, *options, f"uptrain={{distill: {{teacher: {larger_teacher}}}}}")
    (main,) = (root / "from_larger").glob("*-main/config.yaml")
    assert load(main).objective.teacher == larger_teacher
    assert scalars(metrics(main.parent), "train/divergence")
    with pytest.raises(RankFailedError, match=r"uptrain\.distill\.teacher=.*nowhere is no run"):
        uptrain(
            root / "student.yaml", 1, "run.name=none", f"uptrain={{distill: {{teacher: {root}/nowhere}}}}"
        )


@pytest.mark.second
def test_a_teacher_whose_heads_do_not_divide_over_tensor_ranks_is_refused(root):
    train(
        root / "dense.yaml",
        1,
        "run.name=odd",
        "model.num_heads=1",
        "model.num_kv_heads=1",
        "training.steps=1",
    )
    with pytest.raises(RankFailedError, match=r"has 2 layers of 1 heads and 1 key heads, which parallel\.p"):
        distill_from(root / "odd", root, "tp2")


def test_lora_changes_only_its_target_weights_and_merges_into_them(root):
    overrides = ["run.name=lora", "optimizer.trained=lora", "training.steps=12", "optimizer.lr=0.003"]
    train(root / "student.yaml", 1, *overrides)
    loss, changed = run_ranks(merged_loss_and_changed_weights, 1, root / "student.yaml", overrides)[0]
    losses_of_run = scalars(metrics(root / "lora"), "eval/loss")
    assert loss == pytest.approx(losses_of_run[-1], abs=1e-5)
    assert losses_of_run[-1] != losses_of_run[0]
    assert changed == {"qkv.weight", "output.weight"}


def merged_loss_and_changed_weights(config, overrides):
    """The loss of the run with its LoRA updates merged, and the names of weights that differ from the start."""
    with cpu_mesh() as mesh:
        validation = Validation(load(config, overrides), mesh)
        run, dense = (WeightSource.find("init.from", config.parent / name) for name in ("lora", "dense"))
        model = validation.model(run.model(), run)
        before = dense.tensors(run.model())
        changed = {
            name.split(".self_attention.")[-1]
            for name, weight in model.named_parameters()
            if name in before.names and not weight.equal(before.read(name, ["fp32"])["fp32"])
        }
        return validation.losses(model, 0)[0], changed


ATTENTION_PARTS = {"short_convolution": 4, "output_norm": True, "output_gate": "silu"}


def with_parts(root, *overrides, preset="flurka", parts=ATTENTION_PARTS):
    """Overrides of a student with convolution, norm and gate around its attention, started from the run `around`."""
    blocks = {} if preset == "softmax" else {"compression": {"block_size": 16, "rank": 4}}
    attention = json.dumps({"preset": preset, **blocks, **parts})
    return [f"init.from={root}/around", f"model.attention={attention}", "training.steps=2", *overrides]


@pytest.fixture(scope="module")
def run_with_parts(root):
    """A dense run with convolution, norm and gate around its attention."""
    _, *overrides = with_parts(root, "run.name=around", "optimizer.lr=0.02", preset="softmax")
    train(root / "dense.yaml", 1, *overrides, "schedule.warmup_steps=0")
    return root / "around"


@pytest.mark.second
def test_a_student_takes_over_convolution_norm_and_gate_of_its_dense_model(root, run_with_parts):
    uptrain(
        root / "student.yaml",
        1,
        *with_parts(root, "run.name=taken"),
        "uptrain={transfer: {steps: 3, lr: 0.02}}",
    )
    changed = run_ranks(changed_weights, 1, run_with_parts, root / "taken/1-transfer")[0]
    assert changed
    assert all(".core." in name for name in changed), "an attention transfer leaves the parts as they are"
    assert any(
        "output_gate" in name
        for name in run_ranks(changed_weights, 1, run_with_parts, root / "taken/2-main")[0]
    )
    report = json.loads((root / "taken/uptrain_report.json").read_text())
    assert report["identity"]["student"] == pytest.approx(report["identity"]["dense"], abs=1e-5)


def changed_weights(before, after):
    """Names of weights that are new in a run, or have another value than in an earlier run."""
    sources = (WeightSource.find("init.from", folder) for folder in (before, after))
    old, new = (source.tensors(source.model()) for source in sources)
    names = (name for name in new.names if name.startswith(("1.", "2.")))
    return {
        name
        for name in names
        if name not in old.names
        or not new.read(name, ["fp32"])["fp32"].equal(old.read(name, ["fp32"])["fp32"])
    }


@pytest.mark.second
def test_new_parts_around_attention_are_allowed_if_the_whole_layer_is_trained(root):
    overrides = with_parts(root, f"init.from={root}/dense", "run.name=more")
    uptrain(root / "student.yaml", 1, *overrides, "uptrain={}")
    with pytest.raises(RankFailedError, match=r"layer 0 has output_gate, which the dense model lacks"):
        uptrain(root / "student.yaml", 1, *overrides, "run.name=refused", "uptrain={transfer: {steps: 3}}")
    alone = ["objective.kind=transfer", f"objective.teacher={root}/dense", "optimizer.trained=mechanism"]
    with pytest.raises(RankFailedError, match=r"layer 0 has output_gate, which the dense model lacks"):
        train(root / "student.yaml", 1, *overrides, *alone, "run.name=refused-alone")
    assert not (root / "refused").exists()


def test_a_student_that_lacks_parts_of_its_dense_model_is_refused(root, run_with_parts):
    fewer = with_parts(root, "run.name=refused", parts={"short_convolution": 3, "output_norm": True})
    with pytest.raises(
        RankFailedError, match=r"layer 0 has short_convolution=3 and the dense model 4; set what"
    ):
        uptrain(root / "student.yaml", 1, *fewer, "uptrain={}")
    assert not (root / "refused").exists()


def test_a_teacher_shares_the_tensors_that_are_not_trained_also_after_a_resume(root):
    overrides = ["optimizer.trained=lora", "objective.kind=distill", f"objective.teacher={root}/dense"]
    for model in run_ranks(shared_and_trained, 1, root / "student.yaml", [*overrides, "run.name=shares"])[0]:
        trained = {name for name, (_, trains) in model.items() if trains}
        assert {name.split(".")[-2] for name in trained} >= {"core", "value_update", "output_update"}
        assert {name for name, (is_shared, _) in model.items() if is_shared} == model.keys() - trained


def shared_and_trained(config, overrides):
    """For a start and a resume: name -> whether the teacher has the same tensor, and whether it is trained."""
    results = []
    with cpu_mesh() as mesh:
        for steps in (1, 2):
            trainer = Trainer(load(config, [*overrides, f"training.steps={steps}"]), mesh, providers())
            trainer.run()
            student = trainer.engine.engine.module
            addresses = {name: x.data_ptr() for name, x in student.objective.teacher.model.named_parameters()}
            results.append(
                {
                    name: (addresses.get(name) == x.data_ptr(), x.requires_grad)
                    for name, x in student.named_parameters()
                }
            )
    return results


@pytest.mark.parametrize("key", ["init.from", "init.moments"])
def test_a_missing_source_or_moments_run_is_refused_before_a_folder_is_made(key, root):
    with pytest.raises(RankFailedError, match=f"{key}=nowhere is no run"):
        uptrain(root / "stages.yaml", 1, "run.name=refused", f"{key}=nowhere")
    assert not (root / "refused").exists()


def test_a_corpus_shorter_than_the_longest_sequences_is_refused_at_once(root):
    length = "uptrain.length={steps: 1, seq_len: 1000000}"
    with pytest.raises(
        RankFailedError, match=r"in its validation split, one sample takes uptrain.length.seq_len"
    ):
        uptrain(root / "stages.yaml", 1, "run.name=refused", length)
    assert not (root / "refused").exists()


def test_a_finished_uptraining_can_be_evaluated_again_without_its_moments(root, finished):
    folder = shutil.copytree(finished, finished.with_name("again"))
    moments = (root / "moments").rename(root / "gone")
    try:
        changes = ("training.eval_samples=3", "logging.tensorboard=false")
        uptrain(root / "stages.yaml", 1, "run.name=again", *changes)
    finally:
        moments.rename(root / "moments")
    events = [[file.name for file in run.glob(EVENT_FILES)] for run in (finished, folder)]
    assert len(events[0]) == 1  # the report's
    assert events[0] == events[1]
    report = json.loads((folder / "uptrain_report.json").read_text())
    expected = run_ranks(validation_loss, 1, root / "dense.yaml", root / "dense", "training.eval_samples=3")[
        0
    ]
    assert expected != json.loads((finished / "uptrain_report.json").read_text())["dense"]["loss"]
    assert report["dense"]["loss"] == pytest.approx(expected, abs=1e-6)
    assert report["identity"]["dense"] == pytest.approx(expected, abs=1e-6)


def test_another_tokenizer_is_refused(root):
    other = shutil.copytree(root / "dense", root / "other")
    shutil.rmtree(other / "tokenizer")
    tokenizers.train_bpe(["some words, some more words"] * 9, 270).save(other / "tokenizer")
    with pytest.raises(RankFailedError, match=r"init.from=\S+/other has another tokenizer than data.train="):
        uptrain(root / "stages.yaml", 1, "run.name=refused", f"init.from={other}")
    assert not (root / "refused").exists()
    teacher = ["objective.kind=distill", f"objective.teacher={other}"]
    with pytest.raises(RankFailedError, match=r"objective.teacher=\S+/other has another tokenizer than"):
        train(root / "student.yaml", 1, "run.name=another-teacher", *teacher)


def test_after_a_preflight_refusal_the_same_folder_can_be_used_again(root):
    with pytest.raises(
        RankFailedError, match=r"give it the dense model's section \(model.rope_base=10000.0\)"
    ):
        uptrain(root / "student.yaml", 1, "run.name=mended", "uptrain={}", "model.rope_base=500")
    assert {path.name for path in (root / "mended").iterdir()} == {"lock"}
    uptrain(root / "student.yaml", 1, "run.name=mended", "uptrain={}", "training.steps=2")


def test_a_stop_file_in_the_uptraining_folder_ends_the_current_stage(root):
    stopped = root / "stopped"
    stopped.mkdir()
    (stopped / "STOP").touch()
    assert run_ranks(pretrain_in_this_rank, 1, root / "stages.yaml", ("run.name=stopped",)) == [143]
    assert not (stopped / "STOP").exists()
    assert [path.name for path in stopped.glob("*/checkpoints/step_*")] == ["step_1"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("uptrain.alpha=0.2", r"uptrain\.alpha=0\.2 was 0\.3 when the run began"),
        ("init.moments=null", r"init\.moments=None was '\S+/moments' when the run began"),
    ],
)
def test_continuing_with_another_configuration_is_refused(change, reason, root, finished):
    with pytest.raises(RankFailedError, match=reason):
        run_ranks(pretrain_in_this_rank, 1, root / "stages.yaml", (change,))
