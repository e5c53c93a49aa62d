"""Synthetic tasks: a program that reads the text of an example finds its answers."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import islice

import pytest

from data_pipeline import tokenizers
from data_pipeline.encoding import encode_answered
from data_pipeline.prepare import open_source
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


def example(instance, index: int, stream: int = TRAINING, filler=sentences) -> Example:
    return instance.example(stream, index, filler, lambda found: len(found.text))


def answers(found: Example) -> list[str]:
    return [found.text[start:end] for start, end in found.answers]


def prompt(found: Example) -> str:
    """The text before the first answer."""
    return found.text[: found.answers[0][0]]


def passkey(found: Example) -> list[str]:
    (number,) = re.findall(r" The pass key is (\d+)\. Remember", prompt(found))
    return [f" {number}"]


def needle(found: Example) -> list[str]:
    numbers = dict(re.findall(r"The special number of (\w+) is (\d+)\.", prompt(found)))
    assert len(numbers) == 3
    (word,) = re.findall(r"What is the special number of (\w+)\?", prompt(found))
    return [f" {numbers[word]}"]


def mqar(found: Example) -> list[str]:
    pairs = dict(re.findall(r"([a-z]{2})([A-Z])", found.text[: 3 * 40]))
    assert len(pairs) == 40
    keys = re.findall(r"([a-z]{2})[A-Z]", found.text[3 * 40 :])
    assert len(set(keys)) == 30
    return [pairs[key] for key in keys]


def copy(found: Example) -> list[str]:
    *_, letters, copied = found.text.split("|")
    assert letters == copied
    return [letters[start : start + 5] for start in range(0, len(letters), 5)]


def induction(found: Example) -> list[str]:
    return [found.text.split("*")[1][:2]]


def variables(found: Example) -> list[str]:
    values: dict[str, str] = {}
    for name, value in re.findall(r" VAR ([A-Z]+) = (?:VAR )?(\w+)\.", prompt(found)):
        values[name] = values.get(value, value)
    (number,) = re.findall(r"Which variables hold (\d+)\?", prompt(found))
    assert len(values) == 12
    return [f" {name}" for name, value in values.items() if value == number]


def word_counts(found: Example) -> Counter[str]:
    _, words, _ = prompt(found).split("\n")
    return Counter(words.rstrip(".").split())


def common_words(found: Example) -> list[str]:
    counts = word_counts(found)
    return [f" {word}" for word in sorted(word for word, times in counts.items() if times == 12)]


def frequent_words(found: Example) -> list[str]:
    (first, a), (second, b), (third, c), (_, d) = word_counts(found).most_common(4)
    assert a > b > c > d
    return [f" {first}", f" {second}", f" {third}"]


SOLVERS: dict[str, Callable[[Example], list[str]]] = {
    solver.__name__: solver
    for solver in (passkey, needle, mqar, copy, induction, variables, common_words, frequent_words)
}


@pytest.mark.parametrize("name", TASKS)
def test_the_answers_can_be_found_in_the_text(name: str):
    instance = task(OPTIONS.get(name, name))
    for index in range(23):
        found = example(instance, index)
        assert answers(found) == SOLVERS[name](found)
        assert found.text.isascii()
        assert len(found.text) == instance.length - 1


@pytest.mark.parametrize("name", TASKS)
def test_an_example_depends_only_on_seed_stream_and_index(name: str):
    instance, other = task(name), task(f"{name}:seed=1")
    assert example(instance, 3) == example(task(name), 3)
    texts = [example(instance, 3), example(instance, 4), example(instance, 3, EVALUATION), example(other, 3)]
    assert len({found.text for found in texts}) == 4


def test_prepare_draws_examples_by_its_seed_unless_the_task_names_one():
    def first(spec: str, **seed: int) -> str:
        (text,) = next(iter(open_source([spec], **seed))).texts
        return text

    assert first("task:mqar") == first("task:mqar", seed=0) == first("task:mqar:seed=0", seed=3)
    assert first("task:mqar", seed=3) == first("task:mqar:seed=3") != first("task:mqar")


@pytest.mark.parametrize("name", TASKS)
def test_an_example_may_have_a_million_tokens(name: str):
    instance = task(f"{name}:length={2**20}")
    assert len(example(instance, 0).text) == 2**20 - 1


@pytest.mark.parametrize("name", ["passkey", "needle", "induction"])
def test_the_answer_is_hidden_at_its_depth(name: str):
    instance = task(f"{name}:length=8192,depths=5")
    for index in range(10):
        found = example(instance, index)
        assert found.depth == (index % 5) / 4
        (answer,) = answers(found)
        place = found.text.index(f"*{answer}" if name == "induction" else answer) / len(found.text)
        # Depth counts only the filler, and statements begin at words: together less than 300 of 8,191 characters.
        assert place == pytest.approx(found.depth, abs=0.04)


def test_filler_can_be_read_from_a_file(tmp_path):
    (tmp_path / "book.txt").write_text("Ein Märchen aus alten Zeiten. " * 50)
    instance = task(f"passkey:length=700,filler={tmp_path / 'book.txt'}")
    found = example(instance, 0, filler=Passages.of_file(tmp_path / "book.txt"))
    assert "Mrchen aus alten" in found.text
    assert not any(sentence in found.text for sentence in SENTENCES)
    (document, *_) = (document for document, _ in zip(TaskSource(instance), range(2)))
    assert "Mrchen aus alten" in document.texts[0]


@pytest.mark.parametrize(
    "spec", ["passkey:length=300", "mqar:length=128,spaced=true", "common_words:length=1500"]
)
def test_a_length_is_counted_in_the_tokens_of_any_tokenizer(spec: str):
    tokenizer = tokenizers.train_bpe(iter(SENTENCES), 300)
    instance = task(spec)
    for index in range(5):
        found = instance.example(TRAINING, index, sentences, token_counter(tokenizer))
        encoded = encode_answered(tokenizer, found.text, found.answers)
        assert 0.9 * instance.length < len(encoded.tokens) < instance.length
        assert [tokenizer.decode(encoded.tokens[a:b]) for a, b in encoded.answers] == answers(found)
        flagged = [token for token, flag in zip(encoded.tokens, encoded.scored()) if flag]
        assert tokenizer.decode(flagged) == "".join(answers(found))


def test_a_word_tokenizer_gets_a_text_long_enough_for_its_tokens():
    documents = islice(TaskSource.from_spec("passkey:length=64"), 50)  # no tokenizer is known yet
    tokenizer = tokenizers.train_bpe((document.texts[0] for document in documents), 600)
    found = task("passkey:length=64").example(TRAINING, 0, sentences, token_counter(tokenizer))
    assert len(found.text) > 160  # with some filler
    assert 55 < token_counter(tokenizer)(found) < 64


def test_a_text_that_a_tokenizer_cannot_split_has_bounded_length():
    found = task("mqar:length=64").example(TRAINING, 0, sentences, lambda found: len(found.text.split()))
    assert len(found.text) <= 16 * 63
    assert len(answers(found)) == 8


@pytest.mark.parametrize("spec", ["mqar:pairs=8,length=32", "passkey:length=100"])
def test_a_length_that_is_too_short_is_refused_with_a_sufficient_one(spec: str):
    count = token_counter(tokenizers.ByteTokenizer())
    with pytest.raises(ValueError, match="has no room for an example of these options") as raised:
        task(spec).example(TRAINING, 0, sentences, count)
    enough = int(str(raised.value).split("set length=")[1].split()[0])
    found = task(f"{spec.partition('length=')[0]}length={enough}").example(TRAINING, 0, sentences, count)
    assert count(found) == enough - 1


@pytest.mark.parametrize("spec", ["needle:needles=400000,length=9000000", "common_words:length=8000000"])
def test_more_words_than_exist_are_refused(spec: str):
    with pytest.raises(
        ValueError, match=r"needs .* different words, and 343,000 exist; set a smaller length"
    ):
        next(iter(TaskSource.from_spec(spec)))


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
        ("variables:hops=20000000", "hops=20000000 and chains=2 make 40,000,002 variables, of 11,881,376"),
        # Their lists would not fit in memory.
        (
            "frequent_words:asked=100,alpha=4",
            "length=4096 is less than the 4,294,967,296 words of the shortest",
        ),
        ("common_words:common_times=1000000000", "length=4096 is less than the 3,000,000,003 words of the"),
    ],
)
def test_invalid_task_options_are_refused_in_one_line_with_the_remedy(spec: str, explanation: str):
    with pytest.raises(ValueError, match=re.escape(explanation)) as raised:
        task(spec)
    assert len(str(raised.value).splitlines()) == 1
