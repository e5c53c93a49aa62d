import pytest

from megakernel.config import Model
from megakernel.model.parameters import parameter_count


def count(**changes) -> int:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 100}
    return parameter_count(
        Model.model_validate({**sizes, "attention": "softmax", **changes}), vocab_size=257, seq_len=32
    )


BASE = 384 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 100 + 2 * 64) + 64


def test_a_small_model_by_hand():
    assert count() == BASE, "257 tokens are padded to 384 rows"


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"tie_embeddings": False}, 384 * 64),
        ({"position": "learned"}, 32 * 64),
        ({"position": "learned", "max_positions": 50}, 50 * 64),
        ({"activation": "gelu"}, -2 * 64 * 100),
        ({"norm": "layernorm"}, 5 * 64),
        ({"num_kv_heads": 2}, -2 * 2 * 32 * 64),
        ({"qkv_bias": True}, 2 * 3 * 64),
        ({"bias": True}, 2 * (64 + 200 + 64)),
        ({"attention": "linear"}, 0),
        ({"attention": "performer"}, 0),
        ({"attention": "hedgehog"}, 2 * 4 * 16 * 16),
        ({"attention": "hedgehog", "num_kv_heads": 2}, 2 * (2 * 16 * 16 - 2 * 32 * 64)),
        ({"attention": "flurka"}, 2 * (4 * 16 * 16 + 2 * 8 * 64 + 4 * 17)),
        ({"attention": "flurka_kernel"}, 2 * (4 * 16 * 16 + 2 * 8 * 64 + 4)),
        ({"attention": "local"}, 0),
    ],
)
def test_what_each_choice_adds(changes, more):
    assert count(**changes) == BASE + more
