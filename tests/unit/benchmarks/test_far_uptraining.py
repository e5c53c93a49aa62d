"""The students of the far-context up-training are valid for their dense model."""

import pytest

from benchmarks.far_context import Measures
from benchmarks.far_uptraining import CONFIG, DENSE_RUN, STUDENTS, ModelRow, overrides_of, page
from benchmarks.training_runs import uptrain_run
from megakernel.checkpoint.trained_run import DENSE
from megakernel.config import UserError, load, to_yaml
from megakernel.uptraining.stages import stages
from megakernel.uptraining.transfer import check_parts_around


@pytest.mark.parametrize("student", STUDENTS)
def test_students_read_the_same_tokens_after_those_of_the_dense_model(student):
    config, dense = load(CONFIG, overrides_of(student)), DENSE_RUN.config()
    plan = stages(config, [0, 1], dense.model)
    trained = [stage.config.training.steps for stage in plan if not stage.is_control]
    assert sum(trained) == load(CONFIG, overrides_of("flurka")).training.steps
    read = dense.training.steps * dense.training.global_batch_size
    assert plan[0].config.training.skip_samples[0] == (0, read)
    assert config.init.source == dense.run.folder
    check_parts_around(config.model, dense.model, transfers=len(trained) > 1)


def test_the_dense_model_is_trained_further_with_one_student():
    plans = (
        stages(load(CONFIG, overrides_of(student)), [0, 1], DENSE_RUN.config().model) for student in STUDENTS
    )
    assert [plan[-1].kind == DENSE for plan in plans] == [student == "flurka" for student in STUDENTS]


def test_the_page_has_results_and_overrides_of_each_student():
    measures = Measures(4.0, 4.1, 3.9, 0.1, (4.0, 3.0), (9.0, 8.0))
    text = page(
        [ModelRow("dense", measures, 100), ModelRow("flurka", measures, 10, 4.5, 0.9)], "python -m this"
    )
    assert "| dense |  | 4.0000 | 4.1000 | **3.9000** | +0.1000 |" in text
    assert "| flurka | 4.5000 |" in text
    assert "| **90.0%** | 10 |" in text
    assert "* `flurka`: `uptrain.train_dense=true`" in text


def test_a_finished_up_training_is_reused_only_with_its_configuration(tmp_path):
    overrides = [*overrides_of("window"), f"run.root={tmp_path}"]
    folder = load(CONFIG, overrides).run.folder
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load(CONFIG, overrides)), encoding="utf-8")
    (folder / "uptrain_report.json").write_text('{"window": 32}', encoding="utf-8")
    assert uptrain_run(CONFIG, overrides) == (folder, {"window": 32})
    with pytest.raises(UserError, match=r"optimizer\.beta2"):
        uptrain_run(CONFIG, [*overrides, "optimizer.beta2=0.9"])
