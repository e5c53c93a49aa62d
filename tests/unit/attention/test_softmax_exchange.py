"""Context-parallel softmax: a window's tokens of the shard before, else heads if they divide (Ulysses), else a ring."""

import pytest
import torch

from megakernel import attention
from megakernel.attention import AttentionInputs
from tests.unit.attention.shards import ThreadShard, check_shards, in_shards

SIZE, TOKENS, WIDTH = 2, 4, 4


class RecordingShard(ThreadShard):
    """A shard that records which exchanges were used."""

    def __init__(self, cp_shard: ThreadShard):
        super().__init__(cp_shard.table, cp_shard.rank)
        self.exchanges: set[str] = set()

    def tokens_to_heads(self, x):
        self.exchanges.add("heads")
        return super().tokens_to_heads(x)

    def previous_tokens(self, x, count):
        self.exchanges.add(f"{count} tokens")
        return super().previous_tokens(x, count)

    def start_rotation(self, tensors):
        self.exchanges.add("ring")
        return super().start_rotation(tensors)


def exchanges_used(heads, exchange, preset="softmax"):
    layer = attention.build(preset, num_heads=heads, head_dim=WIDTH, softmax_exchange=exchange)

    def work(cp_shard):
        shard = RecordingShard(cp_shard)
        layer(*(torch.ones(1, heads, TOKENS, WIDTH) for _ in range(3)), AttentionInputs(cp_shard=shard))
        return shard.exchanges

    found = in_shards(SIZE, work)
    assert found == [found[0]] * SIZE
    return found[0]


@pytest.mark.parametrize(
    ("heads", "exchange", "expected"),
    [
        (4, "auto", "heads"),
        (3, "auto", "ring"),
        (1, "auto", "ring"),
        (4, "heads", "heads"),
        (4, "ring", "ring"),
    ],
)
def test_softmax_exchanges_heads_if_they_divide_unless_configured(heads, exchange, expected):
    assert exchanges_used(heads, exchange) == {expected}


@pytest.mark.parametrize(
    ("heads", "exchange", "window", "expected"),
    [
        (4, "auto", 3, "2 tokens"),
        (3, "auto", TOKENS + 1, f"{TOKENS} tokens"),
        (4, "auto", TOKENS + 2, "heads"),
        (3, "auto", TOKENS + 2, "ring"),
        (4, "heads", 3, "heads"),
        (4, "ring", 3, "ring"),
    ],
)
def test_windows_that_fit_in_a_shard_exchange_their_tokens_unless_configured(
    heads, exchange, window, expected
):
    assert exchanges_used(heads, exchange, {"preset": "softmax", "window": window}) == {expected}


def test_a_soft_capped_window_needs_no_heads_that_divide():
    assert exchanges_used(3, "auto", {"preset": "softmax", "window": 3, "softcap": 20.0}) == {"2 tokens"}


DOCUMENTS = {
    "one document": None,
    "documents": [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]],
    "a document each shard": [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]] * 2,
    "continued": [[5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6], [*range(3, 15)]],
}


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "soft cap"])
@pytest.mark.parametrize("window", [2, TOKENS, TOKENS + 1])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_shards_of_a_window_have_the_outputs_and_gradients_of_the_whole(documents, window, softcap):
    preset = {"preset": "softmax", "window": window, "softcap": softcap}
    layer = attention.build(preset, num_heads=6, num_kv_heads=3, head_dim=WIDTH).double()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 3 * TOKENS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (6, 3, 3)
    )
    positions = None if DOCUMENTS[documents] is None else torch.tensor(DOCUMENTS[documents])
    check_shards(layer, (q, k, v), 3, positions, attention.Rotary(WIDTH))


@pytest.mark.parametrize(("exchange", "preset"), [("heads", "softmax"), ("auto", "gaussian")])
def test_heads_that_do_not_divide_cannot_be_exchanged(exchange, preset):
    with pytest.raises(ValueError, match="3 heads do not divide over 2 shards of the sequence"):
        exchanges_used(3, exchange, preset)


def test_other_mechanisms_always_exchange_heads():
    assert exchanges_used(4, "ring", "gaussian") == {"heads"}


@pytest.mark.parametrize("exchange", ["auto", "heads", "ring"])
def test_without_context_parallelism_softmax_decodes_from_its_cache(exchange):
    layer = attention.build("softmax", num_heads=3, head_dim=WIDTH, softmax_exchange=exchange)
    q, k, v = torch.randn(3, 1, 3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    first, state = layer.extend(*(x[:, :, :1] for x in (q, k, v)))
    rest, _ = layer.extend(*(x[:, :, 1:] for x in (q, k, v)), state)
    torch.testing.assert_close(torch.cat([first, rest], 2), layer(q, k, v))
