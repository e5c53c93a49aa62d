"""Small real corpora, prepared once, and configurations that read them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.loader import TrainingBatches
from data_pipeline.manifest import Manifest
from data_pipeline.order import Share
from data_pipeline.prepare import PrepareRequest, prepare, source_kind
from data_pipeline.sources import BENCHMARKS
from megakernel.config.tree import Config

SEQ_LEN = 32


def documents(count: int, seed: int) -> list[str]:
    """Distinct documents of 10 to 200 bytes, some with characters of several bytes."""
    rng = random.Random(seed)
    words = ["alpha", "beta", "déjà", "vu", "漢字", "x = 1\n", "the", "of", "👍"]
    return [f"{seed}/{i} " + " ".join(rng.choices(words, k=rng.randint(2, 25))) for i in range(count)]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def prepared(out: Path, source: list[str], **request: Any) -> Manifest:
    """Run `prepare` with one worker; `request` overrides its defaults, byte tokens and 20% for validation."""
    if source_kind(source) not in BENCHMARKS:
        request = {"validation_fraction": 0.2, **request}
    options = {"tokenizer": "byte", **request}
    manifest = prepare(
        PrepareRequest(source=source, **options), out, workers=1, overwrite=False, console=Console(quiet=True)
    )
    assert manifest is not None
    return manifest


def step_batches(config: Config, step: int, **share: int) -> list[Batch]:
    """The micro-batches of a training step that one rank reads; `share` names the rank."""
    return next(TrainingBatches(config, Corpora(config.data), Share(**share)).from_step(step))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 documents as bytes."""
    return _prepare_bytes(tmp_path_factory.mktemp("corpus"), documents(120, seed=1))


@pytest.fixture(scope="session")
def other_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 other documents as bytes."""
    return _prepare_bytes(tmp_path_factory.mktemp("other"), documents(40, seed=2))


def _prepare_bytes(folder: Path, texts: list[str]) -> Path:
    prepared(folder / "prepared", [str(write_jsonl(folder / "source.jsonl", texts))])
    return folder / "prepared"


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Config]:
    """A configuration that reads `train` through its own index cache; keys of `training` as keywords."""

    def build(train: Any, *, seed: int = 7, data: dict[str, Any] | None = None, **training: Any) -> Config:
        return Config(
            run={"name": "test", "seed": seed},
            model={"num_layers": 1, "hidden_size": 64, "num_heads": 2},
            data={"train": train, "index_cache": tmp_path / "index", "num_workers": 0, **(data or {})},
            training={
                "steps": 10,
                "seq_len": SEQ_LEN,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "eval_samples": 5,
                **training,
            },
        )

    return build
