"""What one does with a folder in the Hugging Face format, which needs no run: generate, chat, evaluate."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from data_pipeline.tokenizers import BPE_EOD, byte_level, train_bpe
from launch.cli import main

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def save_llama(folder, words, tokenizer, end):
    """A Llama of random weights in the Hugging Face format."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=words, **sizes, max_position_embeddings=256, initializer_range=0.2)
    config.bos_token_id, config.eos_token_id = None, end
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a byte tokenizer without a chat template."""
    return save_llama(tmp_path_factory.mktemp("models") / "bytes", 257, byte_level(256, BPE_EOD), 256)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """A model with a BPE tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("models")
    train_bpe(["hello there, short and hello again"] * 3, 270).save(folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    return save_llama(folder / "chat", len(tokenizer), tokenizer, tokenizer.eos_token_id)


def greedy(folder, prompt, count=20):
    """The greedy continuation that `transformers` generates."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    generated = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(generated, skip_special_tokens=True)


GREEDY = ("--temperature", "0", "--max-new-tokens", "20")


def test_generate_gives_the_text_that_transformers_gives(folder, capsys):
    assert main(["generate", str(folder), "--prompt", "def f(", *GREEDY]) == 0
    assert capsys.readouterr().out == f"def f({greedy(folder, 'def f(')}\n"


def test_prompts_and_samples_are_printed_in_order_for_any_batch_size(folder, tmp_path, capsys):
    prompts = ["def f(", "x", "import numpy as np\n" * 40]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    command = ["generate", str(folder), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert main([*command, *GREEDY]) == 0
    continuations = [json.loads(line)["continuation"] for line in capsys.readouterr().out.splitlines()]
    assert continuations == [greedy(folder, prompt) for prompt in prompts]
    sampled = []
    for size in ("1", "5"):
        assert main([*command, "--samples", "3", "--batch-size", size, "--max-new-tokens", "9"]) == 0
        sampled.append([json.loads(line)["continuations"] for line in capsys.readouterr().out.splitlines()])
    assert sampled[0] == sampled[1]
    assert [len(set(samples)) for samples in sampled[0]] == [3, 3, 3]
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file, prompt in zip(files, prompts):
        file.write_text(prompt)
    given = [item for file in files for item in ("--prompt-file", str(file))]
    assert main(["generate", str(folder), *given, *GREEDY]) == 0
    expected = [f"=== {file}\n{greedy(folder, prompt)}\n" for file, prompt in zip(files, prompts)]
    assert capsys.readouterr().out == "".join(expected)


def test_messages_are_rendered_by_the_chat_template(chat_folder, tmp_path, capsys):
    rendered = "<system>short\n<user>hello\n<assistant>"
    options = ["--chat", "--system", "short", *GREEDY]
    assert main(["generate", str(chat_folder), "--prompt", "hello", *options]) == 0
    assert capsys.readouterr().out == f"{greedy(chat_folder, rendered)}\n"
    line = {"messages": [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(line))
    assert (
        main(["generate", str(chat_folder), "--prompts", str(tmp_path / "chats.jsonl"), "--chat", *GREEDY])
        == 0
    )
    assert json.loads(capsys.readouterr().out) == {**line, "continuation": greedy(chat_folder, rendered)}


def test_a_stop_string_ends_the_text(folder, capsys):
    whole = greedy(folder, "x")
    stop = whole[5:8]
    assert main(["generate", str(folder), "--prompt", "x", "--stop", stop, *GREEDY]) == 0
    assert capsys.readouterr().out == f"x{whole[: whole.index(stop)]}\n"


def test_tasks_evaluate_a_folder_on_the_given_data(folder, corpus, capsys):
    tasks = ["--task", "lm", "--task", "mqar:length=64", "--samples", "2"]
    assert main(["evaluate", str(folder), "--data", str(corpus), "--json", *tasks]) == 0
    lm, mqar = json.loads(capsys.readouterr().out)
    assert (lm["seq_len"], lm["samples"], mqar["examples"]) == (256, 2, 2)
    assert not (folder / "evaluation").exists(), "a model's folder is not changed"


def test_a_split_is_evaluated_without_a_validation_split(folder, tmp_path, capsys):
    data = tmp_path / "listops"
    source = "lra:listops:train=9,validation=0,test=9"
    assert main(f"prepare --source {source} --tokenizer {folder} --out {data} --workers 1".split()) == 0
    assert main(f"evaluate {folder} --data {data} --task lm:split=test --samples 2 --json".split()) == 0
    assert json.loads(capsys.readouterr().out)[0]["split"] == "test"


def test_repeated_text_may_have_twice_the_tokens_of_the_data(folder, tmp_path, refused, capsys):
    data, task = tmp_path / "data", "lm:repeated=text,samples=1,seq_len="
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n} " * 40}) + "\n" for n in range(9)))
    command = f"prepare --source {tmp_path}/rows.jsonl --tokenizer {folder} --out {data} --workers 1"
    assert main(command.split()) == 0
    tokens = json.loads((data / "manifest.json").read_text())["splits"]["validation"]["tokens"]
    capsys.readouterr()
    evaluate = ("evaluate", str(folder), "--data", str(data), "--json", "--task")
    assert f"give at most {2 * tokens - 1}" in refused(*evaluate, f"{task}{2 * tokens}")
    assert main([*evaluate, f"{task}{2 * tokens - 1}"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["span"] == tokens - 1


def test_random_ids_are_repeated_without_data(folder, capsys):
    assert main(["evaluate", str(folder), "--task", "lm:repeated=random,seq_len=64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["span"] == 32


@pytest.mark.parametrize(
    ("command", "explanation"),
    [
        ("generate {} --prompt x --chat", "has no chat_template"),
        ("generate {} --prompt x --system y", "is a message; add --chat"),
        ("generate {} --prompt x --step 3", "is no run and has one set of weights; leave it out"),
        ("generate {} --prompt x --end-token xy", "is 2 tokens of the tokenizer; give one"),
        ("generate {} --prompt x --samples 0", "samples=0 adds nothing; give 1 or more"),
        (
            "generate {} --prompts {}/roles.jsonl --chat",
            "role='robot' is unknown; write one of system, developer",
        ),
        ("evaluate {}", "has no data; give --data DIR"),
    ],
)
def test_invalid_options_are_refused_in_one_line_with_the_remedy(command, explanation, folder, refused):
    (folder / "roles.jsonl").write_text('{"messages": [{"role": "robot", "content": "x"}]}')
    assert explanation in refused(*command.replace("{}", str(folder)).split())
