"""Servers of small models in this process, and OpenAI clients for them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch

from data_pipeline.tokenizers import ByteTokenizer, Tokenizer
from megakernel.checkpoint.opened import OpenedModel
from megakernel.config import Config, Corpus, Data, Training
from megakernel.generation.serving.gate import DEFAULT_LIMITS, OWN_NAMES, Hosts, Limits
from megakernel.generation.serving.server import http_server
from megakernel.generation.serving.worker import Worker
from megakernel.model import LanguageModel
from tests.chats import PLAIN
from tests.unit.generation.small_models import FLURKA, build

NAME = "small"


class Ascii(ByteTokenizer):
    """A tokenizer of ASCII bytes: each token is a character, and no token that ends a text can be sampled."""

    vocab_size = 128


@dataclass(frozen=True)
class RandomModel(OpenedModel):
    """A model with random weights that is not in a folder."""

    model: LanguageModel

    @property
    def ends(self) -> frozenset[int]:
        """The end token of the tokenizer."""
        return frozenset({self.tokenizer.eod})

    def load(self) -> tuple[LanguageModel, torch.device]:
        """The model."""
        return self.model, torch.device("cpu")


def random_model(tokenizer: Tokenizer | None = None, **parts: Any) -> RandomModel:
    """A random model with these keys of the model section."""
    tokenizer = tokenizer or Ascii()
    model = build(vocab_size=tokenizer.eod + 1, **parts)
    config = Config.model_construct(
        model=model.settings.model,
        data=Data(train=[Corpus(path=Path("none"))]),
        training=Training(steps=1, seq_len=64, global_batch_size=1),
    )
    return RandomModel(Path("none"), None, config, tokenizer, model)


def chat_model(template: str = PLAIN, **parts: Any) -> RandomModel:
    """A random model with a chat template; FLuRKA without other keys of the model section."""
    tokenizer = Ascii()
    tokenizer.chat_template = template
    return random_model(tokenizer, **parts or {"attention": FLURKA})


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    worker: Worker
    api_key: str = "none"

    @property
    def client(self) -> openai.OpenAI:
        """A new client with its own connections."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, http_client=http_client()
        )

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with http_client() as http:
            return http.get(f"{self.url}{path}").json()


def http_client() -> openai.DefaultHttpx2Client:
    """An HTTP client that ignores the proxies of the environment."""
    return openai.DefaultHttpx2Client(
        trust_env=False,
        verify=False,  # creating a TLS context is slow
    )


@contextmanager
def served(
    opened: OpenedModel,
    api_key: str | None = None,
    *,
    batch_size: int = 32,
    max_sessions: int = 200,
    max_new_tokens: int = 100_000,
    hosts: Hosts | None = OWN_NAMES,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Served]:
    """Serve a model while in the context."""
    worker = Worker(opened, batch_size=batch_size, max_sessions=max_sessions, max_new_tokens=max_new_tokens)
    server = http_server(worker, NAME, api_key, hosts=hosts, limits=limits)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", worker, api_key or "none")
        finally:
            worker.close()
            server.should_exit = True
            thread.join()
