"""Training on conversations: the loss on the assistant's tokens on any layout, and answers in the template."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.cli import main
from megakernel.checkpoint.opened import find_model
from megakernel.evaluation import evaluate_run
from tests.chats import CHATML, PLAIN, conversation, save_tokenizer, write_chats
from tests.distributed.training_run import assert_losses_close, layout, metrics, scalars, train, write_config
from tests.serving import served

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
    """A configuration for conversations of two turns, each ended by the end-of-document token."""
    folder = tmp_path_factory.mktemp("chats")
    chats = [
        conversation(f"{number} + 1?", f"{number + 1}.", "Sure?", "Yes.", system="Add.")
        for number in range(100)
    ]
    corpus = prepare(
        folder,
        chats,
        "--tokenizer",
        save_tokenizer(CHATML, folder / "tokenizer"),
        "--validation-fraction",
        0.2,
    )
    return write_config(folder, corpus)


@pytest.fixture(scope="module")
def one_process(several_turns):
    return train(several_turns, 1, "training.steps=2", "run.name=one")


@pytest.mark.second
@pytest.mark.parametrize("ranks", ["cp2", "tp2 cp2 dp2", "pp2 dp2 zero 1", "dp2 zero 3"])
def test_every_layout_has_the_losses_of_one_process(ranks, several_turns, one_process):
    lines = train(several_turns, *layout(ranks), "training.steps=2", f"run.name={ranks.replace(' ', '_')}")
    assert_losses_close(lines, one_process)


@pytest.mark.parametrize("task", ["lm", "lm:stride=64"])
def test_an_evaluation_counts_only_the_assistants_tokens(task, several_turns, one_process, capsys):
    run = several_turns.parent / "one"
    assert main(["evaluate", str(run), "--task", task, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["tokens"] < 0.4 * 6 * 128
    assert result["bits_per_byte"] is None
    if task == "lm":
        # The same samples; float32 losses are summed in another order.
        assert result["loss"] == pytest.approx(scalars(metrics(run), "eval/loss")[-1], rel=1e-6)
        assert evaluate_run(run).tokens == result["tokens"]


@pytest.fixture(scope="module")
def tuned_run(tmp_path_factory):
    """A run that was trained on ANSWERS, with a byte tokenizer and a plain-text template."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "plain.jinja").write_text(PLAIN)
    chats = [conversation(*pair) for pair in ANSWERS.items()] * 8
    options = ["--tokenizer", "byte", "--chat-template", folder / "plain.jinja", "--validation-fraction", 0]
    config = write_config(folder, prepare(folder, chats, *options))
    train(
        config,
        1,
        *("training.steps=150", "training.eval_samples=0", "optimizer.lr=3e-3", "run.name=tuned"),
        *("model.attention=flurka", "model.attention_pattern=null", "model.num_layers=2"),
        "training.micro_batch_size=8",
    )
    return folder / "tuned"


@pytest.mark.second
@pytest.mark.parametrize("question", list(ANSWERS))
def test_a_tuned_model_answers_in_its_chat_template(question, tuned_run, capsys):
    prompt = f"user: {question}\nassistant: "
    assert (
        main(["generate", str(tuned_run), "--prompt", prompt, "--temperature", "0", "--max-new-tokens", "60"])
        == 0
    )
    # The end-of-document token ends the answer.
    assert capsys.readouterr().out == f"{prompt}{ANSWERS[question]}\n\n"


@pytest.mark.second
def test_a_server_answers_in_the_chat_template(tuned_run):
    with served(find_model(tuned_run)) as server:
        for question, answer in ANSWERS.items():
            request = {
                "model": "small",
                "messages": conversation(question),
                "temperature": 0,
                "extra_body": {"session": "s"},
            }
            response = server.client.chat.completions.create(**request)
            assert response.choices[0].message.content == f"{answer}\n"
            assert response.choices[0].finish_reason == "stop"
            server.client.delete("/sessions/s", cast_to=object)


@pytest.mark.second
def test_an_export_includes_the_chat_template_and_answers_in_it(tuned_run, tmp_path):
    assert main(["export", str(tuned_run), "--to", str(tmp_path / "exported")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.chat_template == PLAIN
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    for question, answer in ANSWERS.items():
        prompt = tokenizer.apply_chat_template(
            conversation(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        generated = model.generate(**prompt, max_new_tokens=60, do_sample=False)
        text = tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == f"{answer}\n"
