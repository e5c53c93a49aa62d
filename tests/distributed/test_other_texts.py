"""A run is not continued on other texts under the path of its corpus."""

import shutil

import pytest

from data_pipeline.corpus import Corpora
from megakernel.config import Data, UserError
from megakernel.training.kept_corpora import keep
from tests.distributed.processes import RankFailedError
from tests.distributed.training_run import train, write_config
from tests.unit.data.conftest import documents, prepared, write_jsonl


def prepare_again(folder, seed: int, **request) -> None:
    shutil.rmtree(folder / "data", ignore_errors=True)
    source = write_jsonl(folder / "texts.jsonl", documents(200, seed=seed))
    prepared(folder / "data", [str(source)], **request)


@pytest.mark.parametrize("processes", [1, 2])
def test_other_training_texts_are_refused_and_restored_ones_continue(tmp_path, processes):
    prepare_again(tmp_path, seed=1)
    config = write_config(tmp_path, tmp_path / "data")
    train(config, processes, "training.steps=2")
    prepare_again(tmp_path, seed=2)
    with pytest.raises(RankFailedError, match=r"data\.train=\S+ has other texts than when the run began \("):
        train(config, processes, "training.steps=3")
    prepare_again(tmp_path, seed=1)
    train(config, processes, "training.steps=3")
    prepare_again(tmp_path, seed=2)
    (tmp_path / "run" / "corpora.json").unlink()
    train(config, processes, "training.steps=4")


def test_other_validation_texts_are_named(tmp_path):
    prepare_again(tmp_path, seed=1)
    shutil.copytree(tmp_path / "data", tmp_path / "validation")
    data = Data(train=tmp_path / "data", validation=tmp_path / "validation")
    for began in (False, True):
        assert keep(tmp_path, Corpora(data), began=began, evaluates=True) == []
    shutil.rmtree(tmp_path / "validation")
    prepared(tmp_path / "validation", [str(write_jsonl(tmp_path / "new.jsonl", documents(300, seed=3)))])
    assert keep(tmp_path, Corpora(data, validation=False), began=True, evaluates=False) == []
    (warning,) = keep(tmp_path, Corpora(data), began=True, evaluates=True)
    assert warning.startswith(
        f"warning: {tmp_path / 'validation'} has other validation texts than at the last start"
    )
    assert keep(tmp_path, Corpora(data), began=True, evaluates=True) == []


def test_a_damaged_record_is_refused(tmp_path):
    prepare_again(tmp_path, seed=1)
    (tmp_path / "corpora.json").write_text("{")
    with pytest.raises(UserError, match=r"corpora\.json is damaged; remove it"):
        keep(tmp_path, Corpora(Data(train=tmp_path / "data")), began=True, evaluates=False)
