"""Context-parallel softmax: exchange of heads if they divide (Ulysses), otherwise ring attention."""

import pytest
import torch

from megakernel import attention
from megakernel.attention import AttentionInputs
from tests.unit.attention.shards import ThreadShard, in_shards

SIZE, TOKENS, WIDTH = 2, 4, 4


class RecordingShard(ThreadShard):
    """A shard that records which exchanges were used."""

    def __init__(self, cp_shard: ThreadShard):
        super().__init__(cp_shard.table, cp_shard.rank)
        self.exchanges: set[str] = set()

    def tokens_to_heads(self, x):
        self.exchanges.add("heads")
        return super().tokens_to_heads(x)

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
