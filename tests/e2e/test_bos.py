"""A run whose documents begin with BOS, and its export, prepend BOS to prompts."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.cli import main
from megakernel.generation import Sampling, generate_texts
from tests import bos_tokenizers
from tests.distributed.training_run import train, write_config
from tests.unit.data.conftest import documents, prepared, write_jsonl

OPTIONS = ("model.attention=softmax", "model.attention_pattern=null", "data.isolate_documents=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bos")
    bos_tokenizers.save("template", folder / "tokenizer")
    source = write_jsonl(folder / "texts.jsonl", documents(200, seed=1))
    prepared(folder / "data", [str(source)], tokenizer=str(folder / "tokenizer"))
    config = write_config(folder, folder / "data")
    train(config, 1, *OPTIONS, "training.steps=8", "optimizer.lr=1e-2", "training.eval_samples=0")
    assert main(["export", str(folder / "run"), "--to", str(folder / "exported")]) == 0
    return folder / "run"


@pytest.mark.second
@pytest.mark.parametrize("prompt", ["", "the alpha"])
def test_bos_is_prepended_to_prompts_in_megakernel_and_in_transformers(prompt, run):
    folder = run.parent / "exported"
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert ids[0].tolist().count(tokenizer.bos_token_id) == 1
    generated = model.eval().generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    expected = "".join(
        piece.text
        for piece in generate_texts(run, [prompt], max_new_tokens=20, sampling=Sampling(temperature=0))
    )
    assert tokenizer.decode(generated, skip_special_tokens=True) == expected != ""
    # Without BOS the logits differ.
    assert not model(ids).logits[0, -1].equal(model(ids.where(ids > 0, 1)).logits[0, -1])


def test_a_synthetic_task_is_evaluated_with_bos(run, capsys):
    task = "passkey:digits=2,length=200"
    assert main(["evaluate", str(run), "--task", task, "--samples", "2"]) == 0
    assert "passkey" in capsys.readouterr().out
