import pytest

from megakernel.config import Model

from .trees import problems

SIZES = {"num_layers": 1, "hidden_size": 64, "num_heads": 4}


def attention(tree) -> dict:
    return problems(model={"attention": tree})


@pytest.mark.parametrize(
    ("tree", "key", "remedy"),
    [
        ({"preset": "softmax", "normalize": False}, "normalize", "take similarity: gaussian or remove it"),
        ({"preset": "gaussian", "feature_map": {}}, "feature_map", "remove it or take similarity: kernel"),
        ({"preset": "gaussian", "near": {"block_size": 64}}, "near",
         "take similarity: softmax or kernel with it"),
        ({"preset": "mgk", "mixture": {"sigma2": [1.0]}}, "mixture.sigma2", "write one value per key"),
        ({"preset": "mlk", "mixture": {"sigma2": "learned"}}, "mixture.sigma2",
         "remove it or take similarity: gaussian"),
        ({"preset": "mgk", "mixture": {"estep": "hard", "m_step": True}}, "mixture.m_step", "remove one"),
        ({"preset": "mlk", "mixture": {"m_step": True}}, "mixture.m_step",
         "remove it or take similarity: gaussian"),
        ({"preset": "mlk", "mixture": {"estep": "hard"}}, "mixture.estep",
         "remove it or take similarity: gaussian"),
        ({"preset": "flurka", "mixture": {"estep": "hard"}}, "mixture.estep", "remove it or take preset: mgk"),
        ({"preset": "flurka_kernel", "mixture": {"m_step": True}}, "mixture.m_step",
         "remove it or take preset: mgk"),
        ({"preset": "local", "mixture": {"m_step": True}}, "mixture.m_step", "remove it or take preset: mgk"),
        ({"preset": "linformer_causal", "mixture": {"estep": "hard"}}, "mixture.estep",
         "remove it or take preset: mgk"),
        ({"preset": "flurka", "mixture": {"sigma2": [1.0, 3.0]}}, "mixture.sigma2",
         "remove it or take similarity: gaussian"),
        ({"preset": "flurka_eva", "mixture": {}}, "mixture", "remove it or remove mechanism"),
        ({"preset": "mlk", "mixture": {"sigma2": [1.0, 3.0]}}, "mixture.sigma2",
         "remove it or take similarity: gaussian"),
        ({"preset": "skyformer", "mixture": {}}, "mixture", "remove it or remove mechanism"),
        ({"preset": "softmax", "skyformer": {}}, "skyformer", "remove it or take mechanism: skyformer"),
        ({"preset": "nystromformer", "nystromformer": {"conv_kernel": 4}}, "nystromformer.conv_kernel",
         "set 3 or 5"),
    ],
)  # fmt: skip
def test_contradicting_parts_are_refused_with_a_remedy(tree, key, remedy):
    assert attention(tree)[f"model.attention.{key}"].remedy == remedy


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("skyformer", "draws landmarks from the whole sequence"),
        ("nystromformer", "draws landmarks from the whole sequence"),
        ("bigbird", "divides the whole sequence into blocks"),
        ("informer", "samples keys of the whole sequence"),
        ("reformer", "sorts the whole sequence"),
    ],
)
def test_mechanisms_of_the_whole_sequence_need_an_encoder_without_isolation(preset, reason):
    assert reason in str(attention(preset)["model.attention"])
    encoder = {"kind": "masked_lm", "attention": preset, "position": "learned"}
    not_isolated = {"isolate_documents": False}
    assert "data.isolate_documents" in problems(model=encoder)
    assert not problems(model=encoder, data=not_isolated)
    assert not problems(model=encoder, data=not_isolated, parallel={"context": 2})


@pytest.mark.parametrize("preset", ["gaussian", "kernelized", "mgk", "smgk", "mlk", "smlk"])
def test_mixtures_are_valid_in_decoders_and_encoders(preset):
    assert not attention(preset)
    assert not problems(model={"kind": "masked_lm", "attention": preset})


@pytest.mark.parametrize("preset", ["flurka", "flurka_kernel", "linformer_causal", "local"])
@pytest.mark.parametrize("kind", ["projected", "shifted"])
def test_mixtures_are_valid_in_windows_and_for_landmarks(preset, kind):
    assert not attention({"preset": preset, "mixture": {"kind": kind, "keys": 3}})


@pytest.mark.parametrize("preset", ["linformer", "flurka_rnn", "flurka_performer"])
def test_mixtures_are_valid_for_landmarks_of_the_whole_sequence(preset):
    config = {"preset": preset, "mixture": {}}
    assert not problems(
        model={"kind": "masked_lm", "attention": config, "position": "learned"},
        data={"isolate_documents": False},
    )


def test_projected_mixtures_need_one_projection_per_key():
    for preset, keys in (("mgk", 2), ("smgk", 1), ("softmax", 1)):
        assert Model.model_validate({**SIZES, "attention": preset}).attention.keys_per_head == keys
