"""Runs on several corpora: how much of each they read, and runs that earlier versions began."""

from pathlib import Path

import pytest

from megakernel.config.yaml_text import parse, write
from tests.unit.data.conftest import documents, prepared, write_jsonl

from .processes import run_ranks
from .training_run import layout, metrics, pretrain_and_return_output, scalars, train, write_config


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    """A folder of two prepared corpora, web-0 and web-1, the second of a tenth of the first's documents."""
    folder = tmp_path_factory.mktemp("corpora")
    for number, count in enumerate((900, 90)):
        source = write_jsonl(folder / f"{number}.jsonl", documents(count, seed=number))
        prepared(folder / f"web-{number}", [str(source)])
    return folder


def start_lines(config: Path, *overrides: str) -> list[str]:
    (out,) = run_ranks(pretrain_and_return_output, 1, config, overrides)
    return [line for line in out.splitlines() if line.startswith(("data of", "warning"))]


@pytest.mark.second
def test_the_start_prints_each_corpus_s_share_and_passes(corpora, tmp_path):
    config = write_config(tmp_path, corpora / "web-*")
    brief = ("logging.tensorboard=false", "model.num_layers=1", "model.attention_pattern=[linear]")
    lines = start_lines(config, *brief, "training.steps=20")
    assert [line.split(": ")[0] for line in lines] == [f"data of {corpora}/web-{i}" for i in range(2)]
    shares = [float(line.split()[3]) for line in lines]
    assert sum(shares) == pytest.approx(100, abs=0.01)  # four digits of each
    assert shares[1] == pytest.approx(9, abs=1)
    equal = f"data.train={{{corpora}/web-0: 1, {corpora}/web-1: 1}}"
    lines = start_lines(config, *brief, "training.steps=60", equal, "run.name=equal")
    assert "50 % of what is read" in lines[0]
    assert lines[2].startswith(
        f"warning: data.train={corpora}/web-1 would be read more than 4 times (at most "
    )


@pytest.mark.second  # four runs
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_of_an_earlier_version_reads_on_in_its_order(ranks, corpora, tmp_path):
    listed = write_config(tmp_path, f"[{corpora / 'web-0'}, {corpora / 'web-1'}]")
    old = (
        f"data.train={{{corpora}/web-0: 1, {corpora}/web-1: 1}}",
        "data.blend=periodic",
        "logging.tensorboard=false",
    )
    whole = train(listed, ranks, *old, "training.steps=4", "run.name=whole")
    train(listed, ranks, *old, "training.steps=2")
    recorded = tmp_path / "run/config.yaml"
    tree = parse(recorded.read_text(), "config.yaml")
    for key in ("blend", "tokenizer", "verify"):  # keys that it did not know
        del tree["data"][key]
    recorded.write_text(write(tree))
    continued = train(listed, ranks, "training.steps=4", "logging.tensorboard=false")
    assert scalars(continued, "train/loss") == scalars(whole, "train/loss")
    assert scalars(continued, "eval/loss")[-1] == scalars(whole, "eval/loss")[-1]
    assert parse(recorded.read_text(), "config.yaml")["data"]["blend"] == "periodic"
    new = train(listed, ranks, "training.steps=4", "logging.tensorboard=false", "run.name=new")
    assert scalars(new, "train/loss")[1:] != scalars(whole, "train/loss")[1:], "a new run reads by tokens"


@pytest.mark.second
@pytest.mark.parametrize("ranks", ["one process", "dp2", "pp2", "tp2 cp2"])
def test_the_loss_of_each_validation_corpus_is_logged(ranks, corpora, tmp_path):
    """Their mean by tokens is eval/loss, in float32; so they belong to the right samples."""
    world_size, *overrides = layout(ranks)
    names = [f"{corpora}/web-{number}" for number in range(2)]
    config = write_config(tmp_path, corpora / "web-0")
    weights = f"data.validation={{{names[0]}: 2, {names[1]}: 1}}"
    options = (weights, "training.steps=2", "training.eval_samples=9", "logging.tensorboard=false")
    plain = train(config, world_size, *overrides, *options)
    [output, *_] = run_ranks(
        pretrain_and_return_output,
        world_size,
        config,
        (*overrides, *options, "training.eval_sources=true", "run.name=by-source"),
        timeout=240,
    )
    by_source = metrics(tmp_path / "by-source")
    assert scalars(by_source, "eval/loss") == scalars(plain, "eval/loss")
    first, second = (scalars(by_source, f"eval/loss/{name}") for name in names)
    assert len(first) == len(second) == 2
    assert first != pytest.approx(second, rel=1e-4)
    means = [(6 * a + 3 * b) / 9 for a, b in zip(first, second)]
    assert means == pytest.approx(scalars(plain, "eval/loss"), rel=1e-5)
    assert f"    {names[1]}: loss {second[-1]:.4f}\n" in output
    assert not any(tag.startswith("eval/loss/") for line in plain for tag in line)


def test_a_single_validation_corpus_has_no_loss_of_its_own_and_the_start_says_so(corpora, tmp_path):
    config = write_config(tmp_path, corpora / "web-0")
    options = ("training.steps=1", "training.eval_sources=true", "logging.tensorboard=false")
    [output] = run_ranks(pretrain_and_return_output, 1, config, options)
    assert "training.eval_sources=true has no effect on 1 validation corpora\n" in output
