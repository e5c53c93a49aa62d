import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.objective import open_objective
from data_pipeline.order import Share
from data_pipeline.samples import BlendedSamples, CorpusSamples
from megakernel.config.errors import UserError
from megakernel.config.tree import Config
from tests.hostile import Harm, plant_pickle
from tests.unit.data.conftest import SEQ_LEN

Configure = Callable[..., Config]


def open_batches(config: Config, **share: int) -> TrainingBatches:
    return TrainingBatches(config, Corpora(config.data), Share(**share))


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    """Every sequence's tokens and last label: the sample."""
    return [
        (*tokens, labels[-1])
        for batch in batches
        for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist())
    ]


def global_batch(config: Config, step: int, data_size: int = 1) -> list[tuple[int, ...]]:
    """The sequences of a step in consumption order, from all replicas."""
    replicas = [
        next(open_batches(config, data_rank=rank, data_size=data_size).from_step(step))
        for rank in range(data_size)
    ]
    return [row for passes in zip(*replicas) for row in rows(list(passes))]


def steps_per_epoch(config: Config) -> int:
    record = Corpora(config.data).train[0].record("train")
    return (record.tokens - 1) // config.training.seq_len // config.training.global_batch_size


@pytest.mark.parametrize(("data_size", "micro"), [(1, 8), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_a_global_batch_is_the_same_for_every_layout(
    corpus: Path, configure: Configure, data_size: int, micro: int
):
    for step in (0, 9):
        expected = global_batch(configure(corpus), step)
        assert global_batch(configure(corpus, micro_batch_size=micro), step, data_size) == expected


def test_raising_the_steps_of_a_run_keeps_the_order_of_all_epochs(corpus: Path, configure: Configure):
    epoch = steps_per_epoch(configure(corpus))
    for step in (0, epoch - 1, epoch, epoch + 1, 2 * epoch):
        last = configure(corpus, steps=step + 1)
        assert global_batch(last, step) == global_batch(configure(corpus, steps=10 * epoch), step)


def test_a_restart_continues_the_stream(corpus: Path, configure: Configure):
    config = configure(corpus, steps=40)
    run = [rows(batches) for batches in open_batches(config).from_step(0)]
    assert len(run) == 40
    for step in (1, 17, 39):
        assert [rows(batches) for batches in open_batches(config).from_step(step)] == run[step:]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_prefetch_the_same_batches(corpus: Path, configure: Configure, workers: int):
    config = configure(corpus, data={"num_workers": workers})
    batches = open_batches(config)
    read_ahead = list(batches.from_step(2))
    assert [len(of_step) for of_step in read_ahead] == [4] * 8
    assert [rows(of_step) for of_step in read_ahead] == [
        rows(next(batches.from_step(step))) for step in range(2, 10)
    ]


def test_reading_does_not_change_the_global_random_state(corpus: Path, configure: Configure):
    state = torch.get_rng_state()
    for workers in (0, 1):
        next(open_batches(configure(corpus, data={"num_workers": workers})).from_step(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_each_epoch_reads_every_token_once_in_a_new_order(corpus: Path, configure: Configure):
    config = configure(corpus, steps=200)
    corpora = Corpora(config.data)
    samples = BlendedSamples(corpora.train, "train", SEQ_LEN, 7, config.data.index_cache)
    samples.build(2 * samples.per_epoch)
    first = torch.stack([samples[i] for i in range(samples.per_epoch)])
    second = torch.stack([samples[i] for i in range(samples.per_epoch, 2 * samples.per_epoch)])
    stored = Counter(token for row in IndexedDataset(str(corpus / "train")) for token in row.tolist())
    for epoch in (first, second):
        read = Counter(epoch[:, :-1].flatten().tolist())
        assert read <= stored
        assert stored.total() - read.total() <= SEQ_LEN, "only the end, which fills no sample, is left out"
    assert not torch.equal(first, second)
    assert sorted(first.tolist()) != sorted(second.tolist()), (
        "documents are repacked, not only samples reshuffled"
    )


def test_the_seed_determines_the_order(corpus: Path, configure: Configure):
    assert global_batch(configure(corpus, seed=1), 0) == global_batch(configure(corpus, seed=1), 0)
    assert global_batch(configure(corpus, seed=1), 0) != global_batch(configure(corpus, seed=2), 0)


def test_skip_samples_are_not_read(corpus: Path, configure: Configure):
    stream = [row for step in range(10) for row in global_batch(configure(corpus), step)]
    skipping = configure(corpus, skip_samples=[(3, 5), (20, 24)])
    kept = [row for i, row in enumerate(stream) if not (3 <= i < 5 or 20 <= i < 24)]
    read = [row for step in range(9) for row in global_batch(skipping, step)]
    assert read == kept[:72]


def test_without_isolation_all_labels_count_and_positions_do_not_restart(corpus: Path, configure: Configure):
    batch = next(open_batches(configure(corpus, data={"isolate_documents": False})).from_step(0))[0]
    assert batch.loss_mask.all()
    assert batch.positions.tolist() == [list(range(SEQ_LEN))] * 2


def test_corpora_are_blended_by_their_weights(corpus: Path, other_corpus: Path, configure: Configure):
    blend = configure({str(corpus): 3.0, str(other_corpus): 1.0}, steps=50)
    of_other_corpus = {
        row for step in range(50) for row in global_batch(configure(other_corpus, steps=50), step)
    }
    rows_read = [row for step in range(50) for row in global_batch(blend, step)]
    # Megatron keeps the samples read from every corpus within one of its share.
    for read in range(1, 401):
        assert abs(sum(row in of_other_corpus for row in rows_read[:read]) - read / 4) <= 1


def test_corpora_without_weights_are_read_by_their_tokens(
    corpus: Path, other_corpus: Path, configure: Configure
):
    config = configure([str(corpus), str(other_corpus)], steps=60)
    batches = open_batches(config)
    sizes = [one.record("train").tokens for one in Corpora(config.data).train]
    for use, path, tokens in zip(batches.use(), (corpus, other_corpus), sizes):
        assert use.corpus == str(path)
        assert use.share == pytest.approx(tokens / sum(sizes), abs=1 / 480)  # one of the 480 samples
        # A pass is a whole number of samples, so a corpus of few samples leaves out up to a sample of its tokens.
        assert use.passes == pytest.approx(480 * SEQ_LEN / sum(sizes), rel=0.02)
    equal = open_batches(configure({str(corpus): 1, str(other_corpus): 1}, steps=60)).use()
    assert [use.share for use in equal] == [0.5, 0.5]
    assert equal[1].passes > 2 * equal[0].passes


def test_validation_samples_are_in_proportion_to_the_tokens_of_the_validation_split(
    corpus: Path, other_corpus: Path, configure: Configure
):
    config = configure([str(corpus), str(other_corpus)])
    records = [one.record("validation") for one in Corpora(config.data).of_split("validation")]
    samples = open_objective(config, Corpora(config.data), "validation", SEQ_LEN, "key").samples
    tokens = [record.tokens for record in records]
    assert samples.counts(30)[0] == pytest.approx(30 * tokens[0] / sum(tokens), abs=1)


def test_the_use_of_corpora_counts_all_phases(corpus: Path, other_corpus: Path, configure: Configure):
    phases = [{"until_step": 8, "seq_len": SEQ_LEN, "global_batch_size": 16}]
    config = configure([str(corpus), str(other_corpus)], seq_len=64, seq_len_schedule=phases)
    sizes = [one.record("train").tokens for one in Corpora(config.data).train]
    use, other = open_batches(config).use()
    assert use.share + other.share == pytest.approx(1)
    assert use.passes == pytest.approx((8 * 16 * SEQ_LEN + 2 * 8 * 64) / sum(sizes), rel=0.05)


def test_a_blend_repeats_no_samples_if_its_pattern_repeats(
    corpus: Path, other_corpus: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("data_pipeline.blend.BLEND_PERIOD", 16)
    config = configure({str(corpus): 3.0, str(other_corpus): 1.0}, steps=10, data={"blend": "periodic"})
    rows_read = [row for step in range(10) for row in global_batch(config, step)]
    assert len(set(rows_read)) == 80, "no sample is read twice before a corpus has been read once"
    of_other_corpus = {row for step in range(10) for row in global_batch(configure(other_corpus), step)}
    assert sum(row in of_other_corpus for row in rows_read) == 20


def test_the_index_is_built_once_and_then_reused(corpus: Path, configure: Configure):
    config = configure(corpus, steps=60)
    corpora = Corpora(config.data)
    order: list[str] = []
    builder = TrainingBatches(config, corpora, Share(0, 2), barrier=lambda: order.append("barrier"))
    built = _files(config.data.index_cache)
    assert built
    reader = TrainingBatches(
        config, corpora, Share(1, 2), builds_index=False, barrier=lambda: order.append("barrier")
    )
    for step in (0, 59):
        assert not set(rows(next(builder.from_step(step)))) & set(rows(next(reader.from_step(step))))
    open_batches(config)
    assert _files(config.data.index_cache) == built, "neither reading nor opening again writes anything"
    assert order == ["barrier", "barrier"]


def test_concurrent_builds_of_one_index_write_separate_files(
    corpus: Path, configure: Configure, monkeypatch: pytest.MonkeyPatch
):
    build, folders = CorpusSamples._dataset, []

    def with_concurrent_build(samples: CorpusSamples, epoch: int, folder: Path) -> None:
        folders.append(folder)
        if len(folders) == 1:
            samples._build(epoch)  # the same process id, as in another container
        build(samples, epoch, folder)

    monkeypatch.setattr(CorpusSamples, "_dataset", with_concurrent_build)
    open_batches(configure(corpus, steps=2))
    assert len(folders) == len(set(folders)) == 2
    assert folders[0].parent == configure(corpus).data.index_cache
    assert not list(folders[0].parent.glob("*.partial-*"))


def _files(folder: Path | None) -> dict[str, int]:
    assert folder is not None
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.npy")}


def test_the_index_is_stored_in_the_first_corpus_by_default(
    corpus: Path, tmp_path: Path, configure: Configure
):
    copy = Path(shutil.copytree(corpus, tmp_path / "copy"))
    open_batches(configure(copy, data={"index_cache": None}))
    assert list((copy / ".index_cache").iterdir())
    assert Corpora(configure(copy).data), "an index in the folder of a corpus does not invalidate it"


def test_an_index_is_keyed_by_content_not_by_path(corpus: Path, tmp_path: Path, configure: Configure):
    open_batches(configure(corpus))
    built = _files(tmp_path / "index")
    copy = Path(shutil.copytree(corpus, tmp_path / "copy"))
    assert global_batch(configure(copy), 4) == global_batch(configure(corpus), 4)
    assert _files(tmp_path / "index") == built


def test_an_index_folder_that_cannot_be_written_is_refused(
    corpus: Path, tmp_path: Path, configure: Configure
):
    (tmp_path / "file").write_text("")
    config = configure(corpus, data={"index_cache": tmp_path / "file"})
    with pytest.raises(
        ValueError, match=r"data\.index_cache=.*file cannot be written .*; set it to a writable folder"
    ):
        open_batches(config)


def test_too_little_text_for_one_sample_is_refused_with_the_numbers(corpus: Path, configure: Configure):
    tokens = Corpora(configure(corpus).data).train[0].record("train").tokens
    config = configure(corpus, seq_len=tokens)
    with pytest.raises(ValueError, match="one sample takes") as error:
        open_batches(config)
    assert str(error.value) == (
        f"data.train={corpus} has {tokens} tokens in its train split, one sample takes "
        f"training.seq_len + 1 = {tokens + 1}; prepare more text, or set training.seq_len={tokens - 1}"
    )
    # A small corpus has at least one document for validation, but perhaps not enough of them.
    with pytest.raises(ValueError, match=r"or set training\.seq_len=\d+ or training\.eval_samples=0$"):
        ValidationBatches(configure(corpus, seq_len=tokens), Corpora(config.data), Share())
    assert len(next(open_batches(configure(corpus, seq_len=tokens - 1, steps=2)).from_step(1))) == 4


def validation_rows(config: Config, data_size: int = 1) -> list[tuple[Any, ...]]:
    """The validation samples that count, in order, from all replicas."""
    replicas = [
        list(ValidationBatches(config, Corpora(config.data), Share(rank, data_size)))
        for rank in range(data_size)
    ]
    assert len({len(passes) for passes in replicas}) == 1, "all replicas make equally many passes"
    return [
        row
        for passes in zip(*replicas)
        for batch in passes
        for row, counts in zip(rows([batch]), batch.loss_mask.any(1).tolist())
        if counts
    ]


def test_validation_is_the_same_set_for_every_layout_and_seed(corpus: Path, configure: Configure):
    expected = validation_rows(configure(corpus, micro_batch_size=1))
    assert len(set(expected)) == 5
    for data_size, micro in [(1, 2), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)]:
        assert validation_rows(configure(corpus, micro_batch_size=micro, seed=99), data_size) == expected


def test_validation_reads_only_held_out_documents(corpus: Path, configure: Configure):
    def as_text(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    held_out = [as_text(row.tolist()) for row in IndexedDataset(str(corpus / "validation"))]
    for row in validation_rows(configure(corpus)):
        for part in re.findall(f"[^{chr(256)}]+{chr(256)}?|{chr(256)}", as_text(list(row))):
            assert any(part in document for document in held_out)


def test_validation_reads_the_same_batches_every_time(corpus: Path, configure: Configure):
    batches = ValidationBatches(configure(corpus), Corpora(configure(corpus).data), Share())
    assert [rows([batch]) for batch in batches] == [rows([batch]) for batch in batches]
    assert len(batches) == len(list(batches)) == 3


def test_validation_reads_no_sample_twice(corpus: Path, configure: Configure):
    config = configure(corpus, eval_samples=10_000)
    batches = ValidationBatches(config, Corpora(config.data), Share())
    tokens = Corpora(config.data).of_split("validation")[0].record("validation").tokens
    assert batches.samples == (tokens - 1) // SEQ_LEN
    assert len(set(validation_rows(config))) == batches.samples


def test_the_size_of_an_index_is_checked_before_it_is_built(corpus: Path, configure: Configure, monkeypatch):
    config = configure(corpus, steps=1000, global_batch_size=10**7)
    with pytest.raises(
        UserError, match=r"global_batch_size .* passes over it, more than the 10,000 .*; lower one"
    ):
        open_batches(config)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=30_000))
    with pytest.raises(UserError, match=r"take 0.4 MB of data.index_cache=.*, where 0.0 are free; lower one"):
        open_batches(configure(corpus, steps=500))
    assert not config.data.index_cache.exists()
    monkeypatch.undo()
    (samples,) = open_batches(configure(corpus, steps=1))._phases[0].objective.samples.corpora
    files = [file for file in config.data.index_cache.rglob("*") if file.is_file()]
    assert 0.5 < sum(-(-file.stat().st_size // 4096) * 4096 for file in files) / samples.index_bytes < 1.5


def test_unused_indices_are_deleted(corpus: Path, configure: Configure):
    cache = configure(corpus).data.index_cache
    unused = cache / "train-0123456789abcdef-length32-seed1-epoch0"
    partial, foreign, recent = f"{unused}.partial-7", cache / "my-epoch1", unused.with_name(f"{unused.name}1")
    for folder in (unused, partial, foreign, recent):
        Path(folder).mkdir(parents=True)
        os.utime(folder, (0, 0) if folder != recent else None)
    reader = open_batches(configure(corpus))
    own = {path.name for path in cache.iterdir()} - {recent.name, foreign.name}
    assert own
    assert all(name.endswith(f"-seed7-epoch{epoch}") for epoch, name in enumerate(sorted(own)))
    assert foreign.is_dir()
    assert recent.is_dir()
    rows_read = rows(next(reader.from_step(0)))
    shutil.rmtree(cache)
    again = TrainingBatches(configure(corpus), Corpora(configure(corpus).data), Share(), builds_index=False)
    assert rows(next(again.from_step(0))) == rows_read, "an index that was deleted meanwhile is rebuilt"


def _empty(file: Path, marker: Path) -> None:
    file.write_bytes(b"")


def _objects(file: Path, marker: Path) -> None:
    np.save(file, np.array([Harm(marker)]), allow_pickle=True)


@pytest.mark.parametrize("damage", [plant_pickle, _objects, _empty])
@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
def test_a_foreign_index_file_is_not_unpickled(
    name: str, damage: Callable[[Path, Path], None], corpus: Path, tmp_path: Path, configure: Configure
):
    copy = Path(shutil.copytree(corpus, tmp_path / "copy"))
    config = configure(copy, data={"index_cache": None})
    reader = open_batches(config)
    (file,) = (copy / ".index_cache").glob(f"train-*-epoch0/*-{name}.npy")
    damage(file, tmp_path / "harm")
    for read in (lambda: open_batches(config), lambda: next(reader.from_step(0))):
        with pytest.raises(
            UserError, match=rf"not a sample index \(.*{name}\.npy is not an array.*; delete it"
        ) as refused:
            read()
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "harm").exists()
