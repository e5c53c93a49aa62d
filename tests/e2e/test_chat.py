"""Training on conversations: the loss of the assistant's tokens on any layout, and answers in the template."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.cli import main
from megakernel.checkpoint.opened import find_model
from megakernel.evaluation import evaluate_run
from tests.chats import CHATML, PLAIN, said, saved, write_chats
from tests.distributed.training_run import assert_alike, layout, metrics, scalars, train, write_config
from tests.serving import served
from tests.tiers import tiered

ANSWERS = {
    "What is the capital of France?": "Paris, on the Seine.",
    "What do cows drink?": "Water.",
    "Who wrote Faust?": "Goethe did.",
    "How many legs has a spider?": "Eight of them.",
}


def prepare(folder, chats, *options):
    source = write_chats(folder / "chats.jsonl", chats)
    command = ["prepare", "--chat", "--source", source, "--out", folder / "chats", "--workers", 1, *options]
    assert main([str(part) for part in command]) == 0
    return folder / "chats"


@pytest.fixture(scope="module")
def several_turns(tmp_path_factory):
    """A configuration of a run on conversations of two turns, each ended by the token that ends documents."""
    folder = tmp_path_factory.mktemp("chats")
    chats = [said(f"{at} + 1?", f"{at + 1}.", "Sure?", "Yes.", system="Add.") for at in range(100)]
    corpus = prepare(
        folder, chats, "--tokenizer", saved(CHATML, folder / "tokenizer"), "--validation-fraction", 0.2
    )
    return write_config(folder, corpus)


@pytest.fixture(scope="module")
def one_process(several_turns):
    return train(several_turns, 1, "training.steps=2", "run.name=one")


@pytest.mark.parametrize("ranks", tiered(["cp2", "tp2 cp2 dp2", "pp2 dp2 zero 1", "dp2 zero 3"], ["cp2"]))
def test_any_layout_gives_the_losses_of_one_process(ranks, several_turns, one_process):
    found = train(several_turns, *layout(ranks), "training.steps=2", f"run.name={ranks.replace(' ', '_')}")
    assert_alike(found, one_process)


@pytest.mark.parametrize("task", ["lm", "lm:stride=64"])
def test_an_evaluation_counts_what_the_assistant_said(task, several_turns, one_process, capsys):
    run = several_turns.parent / "one"
    assert main(["evaluate", str(run), "--task", task, "--json"]) == 0
    (whole,) = json.loads(capsys.readouterr().out)
    assert whole["tokens"] < 0.4 * 6 * 128
    assert whole["bits_per_byte"] is None
    if task == "lm":
        # The same samples; float32 losses are added up in another order.
        assert whole["loss"] == pytest.approx(scalars(metrics(run), "eval/loss")[-1], rel=1e-6)
        assert evaluate_run(run).tokens == whole["tokens"]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run that knows ANSWERS, as bytes in a template of text alone."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "plain.jinja").write_text(PLAIN)
    chats = [said(*pair) for pair in ANSWERS.items()] * 8
    options = ["--tokenizer", "byte", "--chat-template", folder / "plain.jinja", "--validation-fraction", 0]
    config = write_config(folder, prepare(folder, chats, *options))
    train(
        config,
        1,
        *("training.steps=150", "training.eval_samples=0", "optimizer.lr=3e-3", "run.name=tuned"),
        *("model.attention=flurka", "model.attention_pattern=null", "model.num_layers=2"),
    )
    return folder / "tuned"


@pytest.mark.second
@pytest.mark.parametrize("question", list(ANSWERS))
def test_a_tuned_model_answers_in_its_template(question, tuned, capsys):
    prompt = f"user: {question}\nassistant: "
    assert (
        main(["generate", str(tuned), "--prompt", prompt, "--temperature", "0", "--max-new-tokens", "60"])
        == 0
    )
    # The end of the document ends the answer.
    assert capsys.readouterr().out == f"{prompt}{ANSWERS[question]}\n\n"


@pytest.mark.second
def test_a_server_answers_in_the_template_too(tuned):
    with served(find_model(tuned)) as server:
        for question, answer in ANSWERS.items():
            asked = {
                "model": "small",
                "messages": said(question),
                "temperature": 0,
                "extra_body": {"session": "s"},
            }
            found = server.client.chat.completions.create(**asked)
            assert found.choices[0].message.content == f"{answer}\n"
            assert found.choices[0].finish_reason == "stop"
            server.client.delete("/sessions/s", cast_to=object)


@pytest.mark.second
def test_the_template_leaves_with_the_export_and_makes_its_prompts(tuned, tmp_path):
    assert main(["export", str(tuned), "--to", str(tmp_path / "exported")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.chat_template == PLAIN
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    for question, answer in ANSWERS.items():
        prompt = tokenizer.apply_chat_template(
            said(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        found = model.generate(**prompt, max_new_tokens=60, do_sample=False)
        text = tokenizer.decode(found[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == f"{answer}\n"
