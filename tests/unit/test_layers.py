"""The layer for other programs: it is the trainer's, and its arguments are checked."""

import subprocess
import sys

import pytest
import torch

from megakernel.config import Config
from megakernel.config.validation import validate
from megakernel.layers import MultiheadAttention
from megakernel.model import LanguageModel
from megakernel.model.layer import TransformerLayer
from megakernel.model.settings import model_settings
from megakernel.parallel import OneProcess

WIDTH, HEADS, LENGTH = 32, 4, 70
PRESETS = {
    "softmax": {},
    "flurka": {"num_kv_heads": 2, "rope_base": 500.0},
    "performer": {"qk_norm": True, "bias": True},
    "mamba2": {"head_dim": 16},
    "gated_deltanet": {"position": "none"},
    "selected": {"rotary_share": 0.5},
}


def config_of(attention, **keys) -> Config:
    model = {"num_layers": 2, "hidden_size": WIDTH, "num_heads": HEADS, "attention": attention, **keys}
    training = {"steps": 1, "seq_len": LENGTH, "global_batch_size": 1}
    run = {"name": "layers", "seed": 3}
    return validate({"run": run, "model": model, "data": {"train": "none"}, "training": training})


def tokens(length=LENGTH, batch=2):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("preset", PRESETS)
def test_it_is_the_layer_that_is_trained_from_the_same_keys(preset):
    """Initial weights, output and gradients, of one document and of several."""
    model = LanguageModel(model_settings(config_of(preset, **PRESETS[preset]), OneProcess(), 100))
    trained = [x for x in model.modules() if isinstance(x, TransformerLayer)][1].self_attention.eval()
    layer = MultiheadAttention(WIDTH, HEADS, preset, index=1, seed=3, **PRESETS[preset]).eval()
    assert not [
        key for key, x in layer.inner.state_dict().items() if not torch.equal(x, trained.state_dict()[key])
    ]
    positions = torch.cat([torch.arange(30), torch.arange(40)]).expand(2, -1)
    for given in (None, positions):
        x, y = (tokens().requires_grad_() for _ in range(2))
        actual = layer(x, positions=given)
        expected, bias = trained(
            y.transpose(0, 1), torch.arange(LENGTH).expand(2, -1) if given is None else given
        )
        expected = expected if bias is None else expected + bias
        torch.testing.assert_close(actual, expected.transpose(0, 1))
        actual.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_give_the_whole_sequence(preset):
    layer = MultiheadAttention(WIDTH, HEADS, preset, **PRESETS[preset]).double().eval()
    x, state, outputs = tokens().double(), None, []
    with torch.no_grad():
        for part in x.split([1, 1, 20, 1, 47], 1):
            output, state = layer.step(part, state)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x))
    assert state.tokens == LENGTH


def test_documents_are_apart_however_they_are_given():
    layer, x = MultiheadAttention(WIDTH, HEADS, "flurka").double(), tokens(batch=1).double()
    starts = torch.tensor([0, 25, 70], dtype=torch.int32)
    positions = torch.cat([torch.arange(25), torch.arange(45)])[None]
    packed = layer(x, cu_seqlens=starts)
    torch.testing.assert_close(packed, layer(x, positions=positions))
    torch.testing.assert_close(packed, torch.cat([layer(x[:, :25]), layer(x[:, 25:])], 1))


@pytest.mark.parametrize("preset", ["softmax", "linear", "skyformer", "linformer"])
def test_an_encoder_ignores_padding(preset):
    keys = {"max_positions": LENGTH} if preset == "linformer" else {}
    layer = MultiheadAttention(WIDTH, HEADS, preset, causal=False, **keys).double().eval()
    mask, x = torch.arange(LENGTH).expand(2, -1) < 50, tokens().double()
    other = torch.where(mask[..., None], x, 7.0)
    torch.testing.assert_close(layer(x, padding_mask=mask)[:, :50], layer(other, padding_mask=mask)[:, :50])
    # Later tokens are seen.
    assert not torch.allclose(layer(x)[:, 0], layer(torch.where(mask[..., None], x, 7.0))[:, 0])


def test_the_text_shows_mechanism_and_sizes():
    layer = MultiheadAttention(WIDTH, HEADS, "flurka", num_kv_heads=2)
    assert "flurka, 4 heads of 8 (2 key heads), blocks of 64, 8 landmarks each, causal" in repr(layer)
    assert "skyformer, 4 heads of 8, bidirectional" in repr(
        MultiheadAttention(WIDTH, HEADS, "skyformer", causal=False)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiheadAttention(34, 4), "hidden_size=34 is not a multiple of num_heads=4"),
        (
            lambda: MultiheadAttention(32, 4, "flurca"),
            "attention=flurca is not an attention preset; choose flurka",
        ),
        (lambda: MultiheadAttention(32, 4, num_kv_heads=3), "num_kv_heads=3 does not divide num_heads=4"),
        (lambda: MultiheadAttention(32, 4, "linformer"), "linformer .* mixes future tokens"),
        (lambda: MultiheadAttention(32, 4, rope_bas=1), "rope_bas=1 is no key of a layer; choose among"),
        (lambda: MultiheadAttention(32, 4, "linformer", causal=False), "pass max_positions"),
        (
            lambda: MultiheadAttention(32, 4)(tokens()[..., :3]),
            r"x has shape \(2, 70, 3\); expected \(batch, tokens, 32\)",
        ),
        (lambda: MultiheadAttention(32, 4)(tokens()[:, :0]), r"x has shape \(2, 0, 32\)"),
        (
            lambda: MultiheadAttention(32, 4)(tokens(), positions=torch.zeros(2, 3)),
            r"positions has shape \(2, 3\); expected \(2, 70\)",
        ),
        (
            lambda: MultiheadAttention(32, 4)(tokens(), padding_mask=torch.ones(2, 70, dtype=torch.bool)),
            "padding_mask is for bidirectional layers",
        ),
        (
            lambda: MultiheadAttention(32, 4, "softmax", causal=False).step(tokens()),
            "step continues a sequence, and a bidirectional layer",
        ),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_a_trained_layer_is_read_from_its_run(tmp_path, corpus):
    from launch.cli import main
    from tests.distributed.training_run import write_config

    config = write_config(tmp_path, corpus)
    assert main(["pretrain", str(config), "training.steps=1", "training.device=cpu"]) == 0
    layer = MultiheadAttention.from_run(tmp_path / "run", index=1)
    assert layer(torch.randn(1, 9, layer.hidden_size)).isfinite().all()
    with pytest.raises(ValueError, match=r"index=9 is no layer of .*; set 0 to "):
        MultiheadAttention.from_run(tmp_path / "run", index=9)
    with pytest.raises(ValueError, match="nowhere"):
        MultiheadAttention.from_run(tmp_path / "nowhere")


def test_it_imports_no_training_library():
    program = (
        "import sys, megakernel.layers; "
        "print(sorted({'megatron', 'deepspeed', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
