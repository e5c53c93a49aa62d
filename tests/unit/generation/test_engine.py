"""Texts that are continued together are those that are continued alone."""

import pytest
import torch

from data_pipeline.tokenizers import ByteTokenizer
from megakernel.generation import GenerationEngine, Sampling, TextRequest
from tests.unit.generation.small_models import BLOCKS, FLURKA, MIXED, build

TOKENIZER = ByteTokenizer()
ENDS = frozenset({TOKENIZER.eod})
LENGTHS = (3, 700, 40, 1, 90, 17)
"""Of prompts; one of them is read in more than one chunk."""


def engine(model, **options):
    return GenerationEngine(model, TOKENIZER, isolate_documents=True, **options)


def prompt(length):
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def requests(**options):
    """One for each of LENGTHS, no two alike."""
    return [
        TextRequest(
            prompt(length), 5 + 3 * place, Sampling(0.7 + place / 10), seed=place, ends=ENDS, **options
        )
        for place, length in enumerate(LENGTHS)
    ]


def continued(engine, wanted):
    """The new tokens of each request."""
    found = {}
    for place, step in engine.run(wanted):
        found[place] = step.text.new_tokens
    return [found[place] for place in range(len(wanted))]


MODELS = {
    "flurka": {"attention": FLURKA},
    "kernel, softmax, window": {"attention_pattern": MIXED, "num_layers": 4},
    "softmax window": {"attention": {"preset": "softmax", "window": 12}},
    "landmarks under a softmax": {"attention": {"preset": "linformer_causal", **BLOCKS}},
    "eva": {"attention": "eva"},
}


@pytest.mark.parametrize("parts", MODELS.values(), ids=MODELS)
def test_texts_do_not_depend_on_those_beside_them(parts):
    model = build(vocab_size=257, **parts)
    alone = [continued(engine(model), [request])[0] for request in requests()]
    assert [len(tokens) for tokens in alone] == [5 + 3 * place for place in range(len(LENGTHS))]
    assert continued(engine(model), requests()) == alone
    few = engine(model, max_batch=2)  # texts wait, join behind others and leave before them
    assert continued(few, requests()) == alone
    assert (few.waiting, few.running) == (0, 0)


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one():
    together = engine(build(vocab_size=257, attention=FLURKA))
    long, short = (together.add(TextRequest(prompt(length), 3, ends=ENDS)) for length in (3000, 9))
    while not short.new_tokens:
        together.step()
    assert len(long.unread) > 1000


def test_a_text_that_is_removed_leaves_nothing_and_disturbs_no_other():
    model = build(vocab_size=257, attention_pattern=MIXED, num_layers=4)
    alone = [continued(engine(model), [request])[0] for request in requests()]
    together = engine(model, max_batch=4)
    texts = [together.add(request) for request in requests()]
    for _ in range(4):
        together.step()
    for gone in (texts[0], texts[1], texts[-1]):  # under way, in its prompt, waiting
        together.remove(gone)
    while together.running or together.waiting:
        together.step()
    assert [text.new_tokens for text in texts[2:-1]] == alone[2:-1]
    assert [text.finish for text in texts] == [None, None, "length", "length", "length", None]


def test_a_text_goes_on_from_where_another_ended():
    model = build(vocab_size=257, attention_pattern=MIXED, num_layers=4)
    likely = {"sampling": Sampling(temperature=0, repetition_penalty=1.5), "ends": ENDS}
    whole = continued(engine(model), [TextRequest(prompt(30), 20, **likely)])[0]
    assert len(set(whole[12:])) > 4, "the penalty makes tokens differ"
    one = engine(model)
    first = one.add(TextRequest(prompt(30), 12, **likely, keeps_state=True))
    while first.finish is None:
        one.step()
    assert first.final_state.tokens == 42
    second = TextRequest([], 8, **likely, previous=first.final_state)
    assert continued(one, [second]) == [whole[12:]]
    assert continued(one, [second, second]) == [whole[12:]] * 2, "a state can be gone on from again"


class Counted(list):
    """A prompt that counts how often it is gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_the_repetition_penalty_goes_through_a_prompt_no_more_often_for_more_tokens():
    one = engine(build(vocab_size=257, attention=FLURKA))
    tokens = Counted(prompt(30))
    text = one.add(TextRequest(tokens, 5, Sampling(repetition_penalty=1.5)))
    begun = tokens.times
    while text.finish is None:
        one.step()
    assert tokens.times == begun
    assert text.seen == {*tokens, *text.new_tokens}


def text_of(model, request):
    return "".join(step.piece for _, step in engine(model).run([request]))


def test_a_stop_string_ends_the_text_before_it():
    model = build(vocab_size=257, attention=FLURKA)
    request = TextRequest(prompt(20), 40, Sampling(), ends=ENDS)
    whole = text_of(model, request)
    stop = whole[7:10]
    at = whole.index(stop)
    stopped = TextRequest(prompt(20), 40, Sampling(), ends=ENDS, stop=("never there", stop))
    assert text_of(model, stopped) == whole[:at]
    longer = TextRequest(prompt(20), 40, Sampling(), ends=ENDS, stop=(whole[-4:] + "more",))
    assert text_of(model, longer) == whole, "what only began like a stop string comes in the end"


def test_any_of_several_tokens_ends_a_text():
    model = build(vocab_size=257, attention=FLURKA)
    tokens = continued(engine(model), [TextRequest(prompt(20), 12)])[0]
    first, second = tokens[4], tokens[6]
    early = TextRequest(prompt(20), 12, ends=ENDS | {first, second})
    assert continued(engine(model), [early]) == [tokens[: min(map(tokens.index, (first, second)))]]


def test_log_probabilities_are_those_of_the_model():
    model = build(vocab_size=257, attention=FLURKA)
    request = TextRequest(prompt(9), 3, Sampling(0.5, top_k=4), logprobs=2, ends=ENDS)
    steps = [step for _, step in engine(model).run([request])]
    read = engine(model).new_decoder()
    for step, tokens in zip(steps, ([prompt(9)], [[steps[0].chosen.token]], [[steps[1].chosen.token]])):
        logs = read.read(tokens)[0, :257].log_softmax(-1)
        assert step.chosen.logprob == pytest.approx(float(logs[step.chosen.token]), abs=1e-4)
        assert [token for token, _ in step.chosen.top_tokens] == logs.topk(2).indices.tolist()


def test_samples_of_one_seed_differ_and_are_always_the_same():
    model = build(vocab_size=257, attention=FLURKA)
    samples = [TextRequest(prompt(9), 8, sample=sample) for sample in range(3)]
    found = continued(engine(model), samples)
    assert found == continued(engine(model), samples)
    assert len(set(map(tuple, found))) == 3
