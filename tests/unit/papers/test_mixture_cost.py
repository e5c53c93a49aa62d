"""Transformer-MGK's appendix B against parameters of layers and executed operations."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel.config import Model
from megakernel.model.parameters import parameter_count
from megakernel.ops.weighted_attention import weighted_attention
from megakernel.papers.mixture_keys import costs

LENGTH, HEADS, WIDTH = 24, 4, 8
INPUT = HEADS * WIDTH


class Operations(TorchDispatchMode):
    """Counts multiplications and additions of matrix products, and the additions of a mixture over its keys."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::bmm"):
            self.count += out.numel() * (2 * args[0].shape[-1] - 1)
        elif func._schema.name == "aten::logsumexp":
            self.count += args[0].numel() - out.numel()
        return out


def executed(heads: int, keys: int, similarity: str) -> int:
    """Operations of the projections, attention and output projection of one layer."""
    x = torch.randn(LENGTH, INPUT)
    to_q, to_k, to_v = (torch.randn(INPUT, parts * heads * WIDTH) for parts in (1, keys, 1))
    with Operations() as counted:
        q, k, v = x @ to_q, x @ to_k, x @ to_v
        q, v = (part.view(1, LENGTH, heads, WIDTH).transpose(1, 2) for part in (q, v))
        k = k.view(1, LENGTH, heads, keys, WIDTH).permute(0, 2, 3, 1, 4)
        out, _ = weighted_attention(q, k, v, similarity=similarity, causal=False)
        out.transpose(1, 2).reshape(LENGTH, heads * WIDTH) @ torch.randn(heads * WIDTH, INPUT)
    # The op computes the normalizer as one more column of the values.
    return counted.count - heads * LENGTH * (2 * LENGTH - 1)


def test_softmax_heads_execute_the_operations_of_the_paper():
    assert executed(HEADS, 1, "softmax") == costs.softmax_operations(LENGTH, HEADS, WIDTH, INPUT)


@pytest.mark.parametrize("keys", [2, 4])
def test_half_the_heads_with_mixture_keys_execute_the_operations_of_the_paper(keys):
    expected = costs.mixture_operations(LENGTH, HEADS, WIDTH, INPUT, keys)
    assert executed(HEADS // keys, keys, "gaussian") == expected


def test_the_printed_sum_is_off_by_half_an_operation_per_number():
    n, h, d, x = 1024, 8, 64, 512
    # By the sum of the line before, (3 M + 2) / M should be (2 M + 3) / M: 3.5 instead of 4 for two keys.
    printed = n**2 * h * (3 * d - 0.5) + n * h * d * (4 * x + h * d - 4)
    assert costs.mixture_operations(n, h, d, x) == printed + n * h * d / 2


def attention_parameters(heads: int, attention: str) -> int:
    """Parameters of the attention of a model with one layer."""
    sizes = {"num_layers": 1, "hidden_size": INPUT, "ffn_hidden_size": 8, "position": "none"}
    model = Model.model_validate({**sizes, "num_heads": heads, "head_dim": WIDTH, "attention": attention})
    rest = 2 * INPUT + 3 * INPUT * 8 + INPUT + 128 * INPUT  # norms, MLP, last norm, embedding
    return parameter_count(model, vocab_size=128, seq_len=LENGTH) - rest


@pytest.mark.parametrize(("keys", "heads"), [(2, 2), (1, 4)])
def test_a_layer_has_the_parameters_of_the_paper(keys, heads):
    if keys == 1:
        assert attention_parameters(heads, "softmax") == costs.softmax_parameters(HEADS, WIDTH, INPUT)
    else:
        assert attention_parameters(heads, "mgk") == costs.mixture_parameters(HEADS, WIDTH, INPUT, keys)


def test_two_keys_save_the_papers_number_of_parameters():
    h, d, x = 8, 64, 512
    saved = costs.softmax_parameters(h, d, x) - costs.mixture_parameters(h, d, x)
    assert saved == h * d * x + 0.5 * (h * d) ** 2 - h


def test_mixtures_need_fewer_operations_and_three_quarters_in_the_limit():
    def ratio(length: int, width: int) -> float:
        sizes = (length, 8, width, 8 * width)
        return costs.mixture_operations(*sizes) / costs.softmax_operations(*sizes)

    # The limits are 3/4 for pairs and 2/3 for projections; the paper's figure 3 shows ratios below 1 everywhere.
    assert all(ratio(n, d) < 1 for n in (128, 1024, 8192) for d in (32, 128, 512))
    assert math.isclose(ratio(2**24, 64), 0.75, abs_tol=2e-3)
