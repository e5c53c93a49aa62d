"""A run's model comes out as a checkpoint that `transformers` loads, and goes in again."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_pipeline.tokenizers import ByteTokenizer
from megakernel.config import Model, UserError
from megakernel.uptraining.dense import DenseCheckpoint
from megakernel.uptraining.dense.configs import plain_config
from megakernel.uptraining.dense.tokenizer import save_tokenizer
from tests import dense_models


@pytest.mark.parametrize("name", dense_models.CONFIGS)
def test_a_plain_configuration_is_what_it_was_read_from(name, tmp_path):
    dense_models.save(name, tmp_path / "in")
    checkpoint = DenseCheckpoint(tmp_path / "in")
    written = plain_config(checkpoint.model, dense_models.VOCABULARY, dense_models.LENGTH)
    known = type(dense_models.CONFIGS[name]).from_dict(written).to_dict()
    ignored = {"dtype", "architectures", "transformers_version", "use_cache", "sliding_window", "model_type"}
    expected = dense_models.CONFIGS[name].to_dict()
    if name.startswith("mistral"):  # a Mistral without a window is a Llama
        assert written["model_type"] == "llama"
    else:
        assert written["model_type"] == expected["model_type"]
    different = {key for key in expected if key not in ignored and known.get(key) != expected[key]}
    # What their code does not read of these models.
    assert different <= {"n_inner", "pretraining_tp", "max_window_layers", "bos_token_id", "eos_token_id"}


def test_the_byte_tokenizer_gives_the_same_ids_in_transformers(tmp_path):
    ours = ByteTokenizer()
    save_tokenizer(ours, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n\treturn x+1 # 3.14\r\nÀ é ß Ω 漢字 👍🏽   \u00a0 " + "".join(map(chr, range(256)))
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod


def test_parts_that_no_architecture_has_together_are_named():
    model = Model(num_layers=1, hidden_size=32, num_heads=4, norm="layernorm", attention="softmax")
    with pytest.raises(UserError, match="no plain architecture of transformers has norm=layernorm"):
        plain_config(model, 384, 64)


def test_a_plain_configuration_builds_the_model(tmp_path):
    """The pieces together, where a run is not needed: tests/distributed/test_dense_start.py has the whole way."""
    model = dense_models.save("qwen3, tied", tmp_path / "in")
    again = AutoModelForCausalLM.from_config(
        type(model.config).from_dict(
            plain_config(DenseCheckpoint(tmp_path / "in").model, dense_models.VOCABULARY, dense_models.LENGTH)
        )
    )
    again.load_state_dict(model.state_dict())
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)
