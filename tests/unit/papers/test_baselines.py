"""Evaluating models of `transformers` as baselines."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_pipeline.batch import PADDING, Batch
from data_pipeline.corpus import Corpora
from data_pipeline.loader import ValidationBatches
from data_pipeline.order import Share
from megakernel.config import Config
from megakernel.config.data import Masking
from megakernel.papers.baselines import NAMES, build_baseline, check_baseline, measure_baseline
from tests.unit.config import trees
from tests.unit.data.conftest import documents, prepared, write_jsonl

CPU = torch.device("cpu")
SEQ_LEN = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    prepared(folder / "prepared", [str(write_jsonl(folder / "rows.jsonl", documents(80, seed=1)))])
    return folder / "prepared"


@pytest.fixture
def configure(corpus: Path, tmp_path: Path) -> Callable[..., Config]:
    def build(isolate_documents: bool = False, seq_len: int = SEQ_LEN, **model) -> Config:
        sizes = {
            "num_layers": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "attention": "softmax",
            "kind": "masked_lm",
        }
        return trees.config(
            model=sizes | model,
            data={"train": corpus, "index_cache": tmp_path, "isolate_documents": isolate_documents},
            training={"seq_len": seq_len, "micro_batch_size": 4, "eval_samples": 6},
        )

    return build


def measure(name: str, config: Config, weights: Path | None = None) -> tuple[int, float, float]:
    corpora = Corpora(config.data)
    model = build_baseline(name, config, corpora.vocab_size, weights)
    batches = ValidationBatches(config, corpora, Share())
    return measure_baseline(model, batches, CPU, lambda done, total: None)


@pytest.mark.parametrize("name", NAMES)
def test_an_untrained_baseline_has_the_loss_of_a_uniform_prediction(name, configure):
    predictions, loss, _ = measure(name, configure())
    assert predictions > 20
    # ln 260 = 5.56; initial weights are small, so predictions are almost uniform.
    assert loss == pytest.approx(5.56, abs=0.2)


def test_samples_without_a_masked_token_are_refused(configure):
    config = configure()
    masking = config.data.model_copy(update={"masking": Masking(rate=1e-9)})
    with pytest.raises(ValueError, match="no token of the 6 samples is masked; give more --samples"):
        measure("nystromformer", config.model_copy(update={"data": masking}))


def padded(config: Config, padding: int) -> tuple[list[Batch], torch.Tensor]:
    """Two sequences, the second padded with the token `padding` after a quarter; and which tokens are not padding."""
    length = config.training.seq_len
    tokens = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).repeat(2, 1)
    tokens[1, length // 4 :] = padding
    positions[1, length // 4 :] = PADDING
    return [Batch(tokens, tokens, positions >= 0, positions)], positions >= 0


@pytest.mark.parametrize("length", [SEQ_LEN, 2 * SEQ_LEN])
@pytest.mark.parametrize("name", NAMES)
def test_padded_sequences_of_any_length_are_measured(name, length, configure):
    config = configure(seq_len=length)
    batches, real = padded(config, 256)
    predictions, loss, _ = measure_baseline(build_baseline(name, config, 257), batches, CPU, lambda *_: None)
    assert predictions == real.sum()
    assert loss == pytest.approx(5.56, abs=0.2)


@pytest.mark.parametrize("length", [SEQ_LEN, 2 * SEQ_LEN])
def test_nystromformer_attends_to_no_padding(length, configure):
    """Its landmarks and its convolution contain padding; without their weights only the mask tells it apart."""
    config = configure(seq_len=length)
    model = build_baseline("nystromformer", config, 257)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in (".query.", ".key.", ".conv.")):
                parameter.zero_()
            elif parameter.dim() == 2:
                parameter *= 10
    of_padding = [padded(config, token)[0] for token in (256, 3)]
    losses = [measure_baseline(model, batches, CPU, lambda *_: None)[1] for batches in of_padding]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_given_weights_are_loaded(name, configure, tmp_path):
    config = configure()
    model = build_baseline(name, config, 257)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5
    model.save_pretrained(tmp_path / "weights")
    assert measure(name, config, tmp_path / "weights")[1] != measure(name, config)[1]
    assert measure(name, config, tmp_path / "weights") == measure(name, config, tmp_path / "weights")


def test_missing_weights_are_not_looked_for_on_the_hub(configure, monkeypatch: pytest.MonkeyPatch):
    requests = []

    def refuse(*address, **options):
        requests.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(ValueError, match="weights=nowhere are not those of a bigbird in the run's sizes"):
        build_baseline("bigbird", configure(), 257, Path("nowhere"))
    assert not requests


def test_baselines_that_do_not_fit_the_run_are_refused(configure):
    with pytest.raises(ValueError, match="baseline=xformer is unknown; choose nystromformer, "):
        check_baseline("xformer", configure())
    with pytest.raises(ValueError, match="is an encoder; give a run of a masked_lm or a classifier"):
        check_baseline("bigbird", configure(kind="causal_lm"))
    with pytest.raises(ValueError, match=r"give a run with data\.isolate_documents=false"):
        check_baseline("bigbird", configure(isolate_documents=True))
    with pytest.raises(ValueError, match="are not those of a bigbird in the run's sizes"):
        build_baseline("bigbird", configure(), 257, Path("/nowhere"))
