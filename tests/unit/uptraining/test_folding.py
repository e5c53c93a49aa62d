"""Frozen weights and small updates of a half-precision run are exported in full precision."""

import pytest
import torch

from megakernel.checkpoint.conversion import Unrounded, fold_updates
from megakernel.checkpoint.fragments import WHOLE
from megakernel.config import Lora, Model, UserError

MODEL = Model(num_layers=1, hidden_size=16, num_heads=4, num_kv_heads=2)
QKV, OUTPUT = "1.self_attention.qkv.weight", "1.self_attention.output.weight"


class Tensors(dict):
    """A checkpoint in memory."""

    @property
    def names(self):
        return set(self)

    def shape(self, name):
        return tuple(self[name].shape)

    def read(self, name, keys, fragment=WHOLE):
        return {"fp32": fragment.of(self[name])}


def draw(*shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_an_update_too_small_for_bfloat16_is_folded_in_float32():
    frozen = {QKV: draw(32, 16).bfloat16(), OUTPUT: draw(16, 16).bfloat16()}
    updates = {
        f"1.self_attention.{name}.{part}": draw(*shape, scale=0.01)
        for name, rows in (("value_update", 8), ("output_update", 16))
        for part, shape in (("up", (rows, 2)), ("down", (2, 16)))
    }
    folded = fold_updates(Tensors(frozen | updates), MODEL, Lora(rank=2, alpha=4.0))
    assert folded.names == {QKV, OUTPUT}
    updates_of = {
        name: 2.0 * updates[f"1.self_attention.{name}.up"] @ updates[f"1.self_attention.{name}.down"]
        for name in ("value_update", "output_update")
    }
    whole = folded.read(OUTPUT)["fp32"]
    assert whole.dtype == torch.float32
    assert torch.equal(whole, frozen[OUTPUT].float() + updates_of["output_update"])
    # Most of the update would be lost in the frozen weights' dtype.
    assert (whole.bfloat16() == frozen[OUTPUT]).float().mean() > 0.5
    # Rows per key head: 2 x 4 of queries, 4 of keys, 4 of values.
    change = (folded.read(QKV)["fp32"] - frozen[QKV].float()).view(2, 16, 16)
    assert not change[:, :12].any()
    torch.testing.assert_close(change[:, 12:].reshape(8, 16), updates_of["value_update"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh", "gelu"])
def test_an_update_of_the_up_projection_is_folded_into_its_half_of_fc1(activation):
    model = MODEL.model_copy(update={"activation": activation})
    rows, inner = (24, 12) if model.is_mlp_gated else (12, 12)
    name = "1.mlp.linear_fc1.weight"
    updates = {"1.mlp.up_update.up": draw(inner, 2), "1.mlp.up_update.down": draw(2, 16)}
    folded = fold_updates(Tensors({name: torch.zeros(rows, 16)} | updates), model, Lora(rank=2, alpha=2.0))
    change = folded.read(name)["fp32"]
    assert not change[: rows - inner].any()
    assert torch.equal(
        change[rows - inner :], updates["1.mlp.up_update.up"] @ updates["1.mlp.up_update.down"]
    )


def test_a_frozen_weight_is_read_from_the_source_of_the_run():
    exact = {"a": draw(8, 8), "b": draw(8, 4), "c": draw(4)}
    saved = Tensors(
        a=exact["a"].bfloat16(),
        b=exact["b"].bfloat16() + 1,  # its source has been trained further
        c=exact["c"] + 1e-3,  # trained: float32
        new=draw(2).bfloat16(),
    )
    found = {name: Unrounded(saved, lambda: Tensors(exact)).read(name)["fp32"] for name in saved}
    assert torch.equal(found["a"], exact["a"])
    assert all(found[name] is saved[name] for name in ("b", "c", "new"))


def test_the_rounded_weight_is_used_if_the_source_is_missing():
    def missing_source():
        raise UserError("nowhere is no run")

    saved = Tensors(a=draw(4).bfloat16())
    assert Unrounded(saved, missing_source).read("a")["fp32"] is saved["a"]
