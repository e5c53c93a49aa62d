"""Servers of small models in this process, and OpenAI's client to ask them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
import uvicorn

from data_pipeline.tokenizers import ByteTokenizer, Tokenizer
from megakernel.checkpoint.opened import OpenedModel
from megakernel.config import Config, Corpus, Data, Training
from megakernel.generation.serving.server import create_app
from megakernel.generation.serving.worker import Worker
from megakernel.model import LanguageModel
from tests.unit.generation.small_models import build

NAME = "small"


class Ascii(ByteTokenizer):
    """No other bytes are drawn: each token is a character, and nothing ends a text."""

    vocab_size = 128


@dataclass(frozen=True)
class RandomModel(OpenedModel):
    """One of random weights, in no folder."""

    model: LanguageModel

    @property
    def ends(self) -> frozenset[int]:
        """The tokenizer's."""
        return frozenset({self.tokenizer.eod})

    def load(self) -> tuple[LanguageModel, torch.device]:
        """The model."""
        return self.model, torch.device("cpu")


def random_model(tokenizer: Tokenizer | None = None, **parts: Any) -> RandomModel:
    """With these keys of the model section."""
    tokenizer = tokenizer or Ascii()
    model = build(vocab_size=tokenizer.eod + 1, **parts)
    config = Config.model_construct(
        model=model.settings.model,
        data=Data(train=[Corpus(path=Path("none"))]),
        training=Training(steps=1, seq_len=64, global_batch_size=1),
    )
    return RandomModel(Path("none"), None, config, tokenizer, model)


@dataclass(frozen=True)
class Served:
    """A server that listens."""

    url: str
    worker: Worker
    api_key: str = "none"

    @property
    def client(self) -> openai.OpenAI:
        """A new one: its connections are its own."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, http_client=direct()
        )

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with direct() as http:
            return http.get(f"{self.url}{path}").json()


def direct() -> openai.DefaultHttpx2Client:
    """Past any proxy that the environment names."""
    return openai.DefaultHttpx2Client(
        trust_env=False, verify=False
    )  # to make a context for TLS takes longest


@contextmanager
def served(
    opened: OpenedModel,
    api_key: str | None = None,
    *,
    batch_size: int = 32,
    max_sessions: int = 200,
    max_new_tokens: int = 100_000,
) -> Iterator[Served]:
    """Within, the model is served."""
    worker = Worker(opened, batch_size=batch_size, max_sessions=max_sessions, max_new_tokens=max_new_tokens)
    server = uvicorn.Server(
        uvicorn.Config(create_app(worker, NAME, api_key), log_level="warning", access_log=False)
    )
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", worker, api_key or "none")
        finally:
            worker.close()
            server.should_exit = True
            thread.join()
