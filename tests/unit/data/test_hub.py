"""A hub that does not answer."""

import socketserver
from collections.abc import Iterator
from threading import Thread

import pytest
from huggingface_hub import constants

from data_pipeline import sources, tokenizers
from data_pipeline.document import Columns
from megakernel.config.errors import UserError


class _HangsUp(socketserver.TCPServer):
    """Closes every connection unanswered, and counts them."""

    calls = 0

    def process_request(self, request, client_address):
        self.calls += 1
        self.shutdown_request(request)


@pytest.fixture
def hub(monkeypatch) -> Iterator[_HangsUp]:
    with _HangsUp(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield server
        server.shutdown()


def test_a_tokenizer_that_is_none_is_not_looked_for_again_and_again(hub):
    with pytest.raises(UserError, match=r"tokenizer 'bite' cannot be loaded .*; give byte, bpe:SIZE"):
        tokenizers.load("bite")
    assert 1 <= hub.calls <= 2, "by us, and without another try by `transformers`"


def test_a_dataset_that_is_none_is_looked_for_once(hub):
    with pytest.raises(UserError, match=r"--source hf:nothing cannot be read: .*; give files, or try again"):
        list(sources.hub_documents("hf:nothing", "train", Columns()))
    assert hub.calls == 1
