"""Texts generated in a batch equal those generated alone."""

import pytest
import torch

from data_pipeline.tokenizers import ByteTokenizer
from megakernel.generation import GenerationEngine, Sampling, TextRequest
from tests.tiers import tiered
from tests.unit.generation.small_models import BLOCKS, FLURKA, MIXED, build

TOKENIZER = ByteTokenizer()
ENDS = frozenset({TOKENIZER.eod})
LENGTHS = (3, 700, 40, 1, 90, 17)
"""Lengths of prompts; the longest is read in several chunks."""


def engine(model, **options):
    return GenerationEngine(model, TOKENIZER, isolate_documents=True, **options)


def prompt(length):
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def requests(**options):
    """One request per length, each with other settings."""
    return [
        TextRequest(
            prompt(length), 5 + 3 * index, Sampling(0.7 + index / 10), seed=index, ends=ENDS, **options
        )
        for index, length in enumerate(LENGTHS)
    ]


def generate(engine, text_requests):
    """The new tokens of each request."""
    found = {}
    for index, step in engine.run(text_requests):
        found[index] = step.text.new_tokens
    return [found[index] for index in range(len(text_requests))]


CHOSEN = {"preset": "selected", "near": {"block_size": 8}, "selection": {"blocks": 2}}
MODELS = {
    "flurka": {"attention": FLURKA},
    "kernel, softmax, window": {"attention_pattern": MIXED, "num_layers": 4},
    "softmax window": {"attention": {"preset": "softmax", "window": 12}},
    "landmarks under a softmax": {"attention": {"preset": "linformer_causal", **BLOCKS}},
    "chosen blocks": {"attention": CHOSEN},
    "landmarks and chosen blocks": {
        "attention": {**FLURKA, "preset": "flurka_selected", "selection": {"blocks": 2}}
    },
    "eva": {"attention": "eva"},
}


@pytest.mark.parametrize("name", tiered(MODELS, ["kernel, softmax, window", "landmarks and chosen blocks"]))
def test_texts_do_not_depend_on_the_others_in_the_batch(name):
    model = build(vocab_size=257, **MODELS[name])
    alone = [generate(engine(model), [request])[0] for request in requests()]
    assert [len(tokens) for tokens in alone] == [5 + 3 * index for index in range(len(LENGTHS))]
    assert generate(engine(model), requests()) == alone
    few = engine(model, max_batch=2)  # texts wait, join later than others and finish before them
    assert generate(few, requests()) == alone
    assert (few.waiting, few.running) == (0, 0)


@pytest.mark.parametrize("name", ["flurka", "landmarks under a softmax"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_text_may_end_in_the_steps_after_it_joins_a_batch(count, name):
    model = build(vocab_size=257, **MODELS[name])
    long, short = (TextRequest(prompt(9), new, seed=new, ends=ENDS) for new in (6, count))
    together = engine(model)
    texts = [together.add(request) for request in (long, short)]
    while together.running or together.waiting:
        stepped = [step.text for step in together.step()]
        assert len(set(stepped)) == len(stepped)  # a token each
    alone = [generate(engine(model), [request])[0] for request in (long, short)]
    assert [text.new_tokens for text in texts] == alone
    assert generate(engine(model), [long, short]) == alone


def test_a_short_prompt_does_not_wait_for_a_long_one():
    together = engine(build(vocab_size=257, attention=FLURKA))
    long, short = (together.add(TextRequest(prompt(length), 3, ends=ENDS)) for length in (3000, 9))
    while not short.new_tokens:
        together.step()
    assert len(long.unread) > 1000


def test_removing_a_text_does_not_change_the_others():
    model = build(vocab_size=257, attention_pattern=MIXED, num_layers=4)
    alone = [generate(engine(model), [request])[0] for request in requests()]
    together = engine(model, max_batch=4)
    texts = [together.add(request) for request in requests()]
    for _ in range(4):
        together.step()
    for removed in (texts[0], texts[1], texts[-1]):  # generating, reading its prompt, waiting
        together.remove(removed)
    while together.running or together.waiting:
        together.step()
    assert [text.new_tokens for text in texts[2:-1]] == alone[2:-1]
    assert [text.finish for text in texts] == [None, None, "length", "length", "length", None]


def test_a_text_continues_from_the_state_of_another():
    model = build(vocab_size=257, attention_pattern=MIXED, num_layers=4)
    options = {"sampling": Sampling(temperature=0, repetition_penalty=1.5), "ends": ENDS}
    whole = generate(engine(model), [TextRequest(prompt(30), 20, **options)])[0]
    assert len(set(whole[12:])) > 4, "the repetition penalty makes tokens differ"
    single = engine(model)
    first = single.add(TextRequest(prompt(30), 12, **options, keeps_state=True))
    while first.finish is None:
        single.step()
    assert first.final_state.tokens == 42
    second = TextRequest([], 8, **options, previous=first.final_state)
    assert generate(single, [second]) == [whole[12:]]
    assert generate(single, [second, second]) == [whole[12:]] * 2, "a state can be continued several times"


class CountingPrompt(list):
    """A prompt that counts how often it is iterated over."""

    iterations = 0

    def __iter__(self):
        self.iterations += 1
        return super().__iter__()


def test_the_repetition_penalty_does_not_reread_the_prompt_for_every_token():
    single = engine(build(vocab_size=257, attention=FLURKA))
    tokens = CountingPrompt(prompt(30))
    text = single.add(TextRequest(tokens, 5, Sampling(repetition_penalty=1.5)))
    initial_iterations = tokens.iterations
    while text.finish is None:
        single.step()
    assert tokens.iterations == initial_iterations
    assert text.seen == {*tokens, *text.new_tokens}


def text_of(model, request):
    return "".join(step.piece for _, step in engine(model).run([request]))


def test_generation_ends_before_a_stop_string():
    model = build(vocab_size=257, attention=FLURKA)
    request = TextRequest(prompt(20), 40, Sampling(), ends=ENDS)
    whole = text_of(model, request)
    stop = whole[7:10]
    stop_start = whole.index(stop)
    stopped = TextRequest(prompt(20), 40, Sampling(), ends=ENDS, stop=("never there", stop))
    assert text_of(model, stopped) == whole[:stop_start]
    longer = TextRequest(prompt(20), 40, Sampling(), ends=ENDS, stop=(whole[-4:] + "more",))
    assert text_of(model, longer) == whole, "an incomplete stop string is output at the end"


def test_any_of_several_end_tokens_ends_a_text():
    model = build(vocab_size=257, attention=FLURKA)
    tokens = generate(engine(model), [TextRequest(prompt(20), 12)])[0]
    first, second = tokens[4], tokens[6]
    early = TextRequest(prompt(20), 12, ends=ENDS | {first, second})
    assert generate(engine(model), [early]) == [tokens[: min(map(tokens.index, (first, second)))]]


def test_log_probabilities_are_those_of_the_model():
    model = build(vocab_size=257, attention=FLURKA)
    request = TextRequest(prompt(9), 3, Sampling(0.5, top_k=4), logprobs=2, ends=ENDS)
    steps = [step for _, step in engine(model).run([request])]
    read = engine(model).new_decoder()
    for step, tokens in zip(steps, ([prompt(9)], [[steps[0].chosen[0].token]], [[steps[1].chosen[0].token]])):
        logs = read.read(tokens)[0, :257].log_softmax(-1)
        (chosen,) = step.chosen
        assert chosen.logprob == pytest.approx(float(logs[chosen.token]), abs=1e-4)
        assert [token for token, _ in chosen.top_tokens] == logs.topk(2).indices.tolist()


def test_samples_of_one_seed_differ_and_are_reproducible():
    model = build(vocab_size=257, attention=FLURKA)
    samples = [TextRequest(prompt(9), 8, sample=sample) for sample in range(3)]
    found = generate(engine(model), samples)
    assert found == generate(engine(model), samples)
    assert len(set(map(tuple, found))) == 3
