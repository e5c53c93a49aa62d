"""Made tasks: each example holds what it asks for, and a program that reads the text finds it."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import islice

import pytest

from data_pipeline import tokenizers
from data_pipeline.encoding import encode_answered
from data_pipeline.spec import build, find_class, split_spec
from data_pipeline.synthetic import EVALUATION, TASKS, TRAINING, Example
from data_pipeline.synthetic.filler import SENTENCES, Passages, sentences
from data_pipeline.synthetic.source import TaskSource, token_counter

OPTIONS = {
    "needle": "needle:needles=3",
    "mqar": "mqar:pairs=40,queries=30,key_length=2,length=1024",
    "variables": "variables:hops=3,chains=3",
    "copy": "copy:answer_length=5",
    "induction": "induction:length=64,answer_length=2",
    "common_words": "common_words:length=2048,common_times=12",
}


def task(spec: str):
    name, texts = split_spec(spec, "--task")
    return build(find_class(name, TASKS, "--task"), name, texts, "--task")


def example(made, index: int, stream: int = TRAINING, filler=sentences) -> Example:
    return made.example(stream, index, filler, lambda found: len(found.text))


def answers(found: Example) -> list[str]:
    return [found.text[start:end] for start, end in found.answers]


def asked(found: Example) -> str:
    """All before the first answer."""
    return found.text[: found.answers[0][0]]


def passkey(found: Example) -> list[str]:
    (number,) = re.findall(r" The pass key is (\d+)\. Remember", asked(found))
    return [f" {number}"]


def needle(found: Example) -> list[str]:
    numbers = dict(re.findall(r"The special number of (\w+) is (\d+)\.", asked(found)))
    assert len(numbers) == 3
    (word,) = re.findall(r"What is the special number of (\w+)\?", asked(found))
    return [f" {numbers[word]}"]


def mqar(found: Example) -> list[str]:
    pairs = dict(re.findall(r"([a-z]{2})([A-Z])", found.text[: 3 * 40]))
    assert len(pairs) == 40
    keys = re.findall(r"([a-z]{2})[A-Z]", found.text[3 * 40 :])
    assert len(set(keys)) == 30
    return [pairs[key] for key in keys]


def copy(found: Example) -> list[str]:
    *_, letters, again = found.text.split("|")
    assert letters == again
    return [letters[at : at + 5] for at in range(0, len(letters), 5)]


def induction(found: Example) -> list[str]:
    return [found.text.split("*")[1][:2]]


def variables(found: Example) -> list[str]:
    held: dict[str, str] = {}
    for name, value in re.findall(r" VAR ([A-Z]+) = (?:VAR )?(\w+)\.", asked(found)):
        held[name] = held.get(value, value)
    (number,) = re.findall(r"Which variables hold (\d+)\?", asked(found))
    assert len(held) == 12
    return [f" {name}" for name, value in held.items() if value == number]


def listed(found: Example) -> Counter[str]:
    _, words, _ = asked(found).split("\n")
    return Counter(words.rstrip(".").split())


def common_words(found: Example) -> list[str]:
    counts = listed(found)
    return [f" {word}" for word in sorted(word for word, times in counts.items() if times == 12)]


def frequent_words(found: Example) -> list[str]:
    (first, a), (second, b), (third, c), (_, d) = listed(found).most_common(4)
    assert a > b > c > d
    return [f" {first}", f" {second}", f" {third}"]


SOLVERS: dict[str, Callable[[Example], list[str]]] = {
    solver.__name__: solver
    for solver in (passkey, needle, mqar, copy, induction, variables, common_words, frequent_words)
}


@pytest.mark.parametrize("name", TASKS)
def test_what_is_asked_for_stands_in_the_text(name: str):
    made = task(OPTIONS.get(name, name))
    for index in range(23):
        found = example(made, index)
        assert answers(found) == SOLVERS[name](found)
        assert found.text.isascii()
        assert len(found.text) == made.length - 1


@pytest.mark.parametrize("name", TASKS)
def test_an_example_depends_on_seed_stream_and_index_alone(name: str):
    made, other = task(name), task(f"{name}:seed=1")
    assert example(made, 3) == example(task(name), 3)
    texts = [example(made, 3), example(made, 4), example(made, 3, EVALUATION), example(other, 3)]
    assert len({found.text for found in texts}) == 4


@pytest.mark.parametrize("name", TASKS)
def test_an_example_may_have_a_million_tokens(name: str):
    made = task(f"{name}:length={2**20}")
    assert len(example(made, 0).text) == 2**20 - 1


@pytest.mark.parametrize("name", ["passkey", "needle", "induction"])
def test_what_is_hidden_lies_at_its_depth(name: str):
    made = task(f"{name}:length=8192,depths=5")
    for index in range(10):
        found = example(made, index)
        assert found.depth == (index % 5) / 4
        (answer,) = answers(found)
        place = found.text.index(f"*{answer}" if name == "induction" else answer) / len(found.text)
        # The filler alone is measured by depth, and statements stand at words: less than 300 characters of 8,191.
        assert place == pytest.approx(found.depth, abs=0.04)


def test_filler_may_be_a_text(tmp_path):
    (tmp_path / "book.txt").write_text("Ein Märchen aus alten Zeiten. " * 50)
    made = task(f"passkey:length=700,filler={tmp_path / 'book.txt'}")
    found = example(made, 0, filler=Passages.of_file(tmp_path / "book.txt"))
    assert "Mrchen aus alten" in found.text
    assert not any(sentence in found.text for sentence in SENTENCES)
    (document, *_) = (one for one, _ in zip(TaskSource(made), range(2)))
    assert "Mrchen aus alten" in document.texts[0]


@pytest.mark.parametrize(
    "spec", ["passkey:length=300", "mqar:length=128,spaced=true", "common_words:length=1500"]
)
def test_a_length_is_counted_in_the_tokens_of_any_tokenizer(spec: str):
    tokenizer = tokenizers.train_bpe(iter(SENTENCES), 300)
    made = task(spec)
    for index in range(5):
        found = made.example(TRAINING, index, sentences, token_counter(tokenizer))
        encoded = encode_answered(tokenizer, found.text, found.answers)
        assert 0.9 * made.length < len(encoded.tokens) < made.length
        assert [tokenizer.decode(encoded.tokens[a:b]) for a, b in encoded.answers] == answers(found)
        flagged = [token for token, flag in zip(encoded.tokens, encoded.scored()) if flag]
        assert tokenizer.decode(flagged) == "".join(answers(found))


def test_fewer_tokens_than_characters_are_enough_for_a_tokenizer_of_words():
    documents = islice(TaskSource.from_spec("passkey:length=64"), 50)  # no tokenizer is known yet
    tokenizer = tokenizers.train_bpe((document.texts[0] for document in documents), 600)
    found = task("passkey:length=64").example(TRAINING, 0, sentences, token_counter(tokenizer))
    assert len(found.text) > 160  # with some filler
    assert 55 < token_counter(tokenizer)(found) < 64


def test_what_a_tokenizer_takes_for_one_word_does_not_grow_without_end():
    found = task("mqar:length=64").example(TRAINING, 0, sentences, lambda made: len(made.text.split()))
    assert len(found.text) <= 16 * 63
    assert len(answers(found)) == 8


@pytest.mark.parametrize("spec", ["mqar:pairs=8,length=32", "passkey:length=100"])
def test_a_length_without_room_is_refused_with_one_that_has_it(spec: str):
    count = token_counter(tokenizers.ByteTokenizer())
    with pytest.raises(ValueError, match="has no room for an example of these options") as raised:
        task(spec).example(TRAINING, 0, sentences, count)
    enough = int(str(raised.value).split("set length=")[1].split()[0])
    found = task(f"{spec.partition('length=')[0]}length={enough}").example(TRAINING, 0, sentences, count)
    assert count(found) == enough - 1


@pytest.mark.parametrize(
    ("spec", "explanation"),
    [
        ("passkeys", "--task passkeys is not a task; choose passkey, "),
        ("mqar:pairz=3", "--task mqar:pairz=3: mqar has no option pairz; choose pairs, "),
        ("mqar:pairs", "'pairs' is not key=value; write mqar:key=value,key=value"),
        ("mqar:pairs=3,pairs=4", "pairs is written twice"),
        ("mqar:pairs=many", "--task mqar.pairs=many "),
        ("mqar:pairs=30", "--task mqar.pairs=30 exceeds the 26 keys of key_length=1; set key_length=2"),
        ("mqar:pairs=4,queries=5", "queries=5 exceeds pairs=4; set at most 4"),
    ],
)
def test_what_no_task_has_is_one_line_with_the_remedy(spec: str, explanation: str):
    with pytest.raises(ValueError, match=re.escape(explanation)) as raised:
        task(spec)
    assert len(str(raised.value).splitlines()) == 1
