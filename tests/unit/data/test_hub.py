"""Requests to a hub that does not answer."""

import socketserver
from collections.abc import Iterator
from threading import Thread

import pytest
from huggingface_hub import constants

from data_pipeline import sources, tokenizers
from data_pipeline.document import Columns
from megakernel.config.errors import UserError


class _SilentServer(socketserver.TCPServer):
    """Closes every connection without an answer, and counts the connections."""

    calls = 0

    def process_request(self, request, client_address):
        self.calls += 1
        self.shutdown_request(request)


@pytest.fixture
def hub(monkeypatch) -> Iterator[_SilentServer]:
    with _SilentServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield server
        server.shutdown()


def test_an_unknown_tokenizer_is_requested_only_once(hub):
    with pytest.raises(UserError, match=r"tokenizer 'bite' cannot be loaded .*; give byte, bpe:SIZE"):
        tokenizers.load("bite")
    assert 1 <= hub.calls <= 2, "once by us, and at most once by `transformers`"


def test_an_unknown_dataset_is_requested_only_once(hub):
    with pytest.raises(UserError, match=r"--source hf:nothing cannot be read: .*; give files, or try again"):
        list(sources.hub_documents("hf:nothing", "train", Columns()))
    assert hub.calls == 1
