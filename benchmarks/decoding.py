"""What a decoded token costs beside `transformers`: a Llama with SDPA and its key-value cache, greedily.

    OMP_NUM_THREADS=1 python -m benchmarks.decoding --out benchmarks/results/decoding_cpu.md

Ours go through what `megakernel generate` runs, the Llama through `generate`; a second table has a step of each model
alone, without choosing and writing text. All have the same sizes, float32, in one process of one thread, and take
turns, so that other work on the machine meets all of them; what counts is the processor time of that process.

No prompt is read: states and caches have the size that a prompt leaves, and random numbers.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch.utils import _pytree as pytree
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.page import add_out, give, opening, table, table_row, typed
from benchmarks.trained import configured
from benchmarks.training_speed import BASELINE, llama_like
from data_pipeline.tokenizers import ByteTokenizer
from megakernel.config import Config
from megakernel.generation import Engine, Request, Sampling
from megakernel.generation.decoding import Decoder
from megakernel.generation.engine import Behind
from megakernel.model import LanguageModel
from megakernel.model.settings import model_settings
from megakernel.ops.softmax_attention import SoftmaxState
from megakernel.parallel import OneProcess

OURS = {"flurka": "FLuRKA", "softmax": "softmax"}
"""Preset of model.attention -> its name on the page."""

LENGTHS = (1024, 4096, 16384, 65536)
BATCHES = (1, 8)
WANTED = 1.3
"""Times what a token of the baseline costs that FLuRKA may cost at the first of LENGTHS."""

TOKENS = 64
"""Tokens of a turn: a block of FLuRKA, whose last token has more to do than the others."""

LONGEST_TURN = 1.0
"""Seconds of a turn, of which slow tokens are fewer, but FEWEST."""

FEWEST = 4

LARGEST = 2**30
"""Bytes of a cache that is not made any more."""

TOKENIZER = ByteTokenizer()
GREEDY = Sampling(temperature=0.0)
FIRST = 65
"""The token that texts go on from."""


class Sizes(NamedTuple):
    """Sizes that all models have in common."""

    layers: int
    width: int
    heads: int

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values of all layers in float32."""
        return 2 * 4 * self.layers * self.width


SIZES = (Sizes(4, 128, 4), Sizes(8, 384, 6))
"""The sizes of configs/demo.yaml, and one of 14 million parameters."""


class Case(NamedTuple):
    """Texts that are continued together, each behind so many tokens."""

    sizes: Sizes
    batch: int
    length: int

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values of all texts."""
        return self.batch * self.length * self.sizes.bytes_per_token


class Subject(NamedTuple):
    """A model with what it keeps of a case's texts; each call goes on from there."""

    generate: Callable[[int], float]
    """Continue every text by so many tokens; CPU seconds of a token of all of them."""

    step: Callable[[int], float]
    """The same of the model alone."""

    state_bytes: int


def configuration(attention: str, sizes: Sizes) -> Config:
    """A run of ours."""
    model = {"num_layers": sizes.layers, "hidden_size": sizes.width, "num_heads": sizes.heads}
    return configured({**model, "attention": attention}, {"seq_len": LENGTHS[-1]})


def own_model(attention: str, sizes: Sizes) -> LanguageModel:
    """Our model."""
    settings = model_settings(configuration(attention, sizes), OneProcess(), TOKENIZER.vocab_size)
    return LanguageModel(settings).eval()


def llama(sizes: Sizes) -> LlamaForCausalLM:
    """The same model in `transformers`."""
    endless = {"bos_token_id": None, "eos_token_id": None}
    own = configuration("softmax", sizes)
    return llama_like(own, TOKENIZER.vocab_size, 2 * LENGTHS[-1], **endless).eval()


def own(model: LanguageModel, case: Case) -> Subject:
    """Ours behind a case's texts."""
    started = [_behind(model, case.length, seed) for seed in range(case.batch)]

    def generate(tokens: int) -> float:
        engine = Engine(model, TOKENIZER, isolate_documents=False, max_batch=case.batch)
        for decoder in started:
            # They join one after the other, and none has ended when the last one is timed.
            most = tokens + case.batch + 1
            engine.add(Request([FIRST], most, GREEDY, behind=Behind(_again(decoder), [], [], case.length)))
        for _ in started:
            engine.step()
        return _seconds(engine.step, tokens)

    def step(tokens: int) -> float:
        together = _again(started[0])
        for decoder in started[1:]:
            together.join(decoder)
        return _seconds(lambda: together.read([[FIRST]] * case.batch).argmax(-1).tolist(), tokens)

    leaves = pytree.tree_leaves([decoder.states for decoder in started])
    return Subject(generate, step, sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)))


def _again(decoder: Decoder) -> Decoder:
    """Another that stands where this one does, and shares its tensors, which nobody changes."""
    other = copy.copy(decoder)
    other.positions = list(decoder.positions)
    return other


def _behind(model: LanguageModel, length: int, seed: int) -> Decoder:
    """A decoder as one text of so many tokens leaves it."""
    draw = torch.Generator().manual_seed(seed)
    decoder = Decoder(model, TOKENIZER.eod, isolate_documents=False)
    decoder.read([torch.randint(256, (2 * TOKENS,), generator=draw).tolist()])
    assert decoder.states is not None
    decoder.states = [
        SoftmaxState(*(torch.randn(*x.shape[:2], length, x.shape[3], generator=draw) for x in state))
        if isinstance(state, SoftmaxState)
        else state
        for state in decoder.states
    ]
    decoder.positions = [length]
    return decoder


def baseline(model: LlamaForCausalLM, case: Case) -> Subject:
    """The Llama behind a case's texts."""
    draw = torch.Generator().manual_seed(0)
    sizes, batch, length = case
    shape = (batch, sizes.heads, length, sizes.width // sizes.heads)
    cache = DynamicCache()
    for layer in range(sizes.layers):
        cache.update(torch.randn(shape, generator=draw), torch.randn(shape, generator=draw), layer)
    said = torch.randint(256, (batch, length + 1), generator=draw)

    def rewind() -> None:
        if more := cache.get_seq_length() - length:
            cache.crop(-more)

    def generate(tokens: int) -> float:
        rewind()
        how = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return _seconds(lambda: model.generate(said, past_key_values=cache, **how), 1) / tokens

    @torch.inference_mode()
    def step(tokens: int) -> float:
        rewind()
        last = said[:, -1:]
        return _seconds(lambda: model(last, past_key_values=cache).logits.argmax(-1).tolist(), tokens)

    kept = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)
    return Subject(generate, step, kept)


def _seconds(step: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


class Costs(NamedTuple):
    """Medians of a subject, CPU seconds of a token of all texts; None where its cache was too large to make."""

    generate: float | None
    step: float | None
    state_bytes: int


def measure(
    case: Case, models: dict[str, LanguageModel], theirs: LlamaForCausalLM, turns: int
) -> dict[str, Costs]:
    """What each model costs in a case."""
    makes: dict[str, Callable[[], Subject]] = {BASELINE: lambda: baseline(theirs, case)}
    makes |= {name: lambda model=model: own(model, case) for name, model in models.items()}
    if case.cache_bytes > LARGEST:
        del makes[BASELINE], makes["softmax"]
    subjects = {name: make() for name, make in makes.items()}
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in subjects}
    tokens = {
        name: min(max(int(LONGEST_TURN / subject.step(2)), FEWEST), TOKENS)
        for name, subject in subjects.items()
    }
    for _ in range(turns):
        for name, subject in subjects.items():
            for times, way in zip(found[name], (subject.generate, subject.step)):
                times.append(way(tokens[name]))
    costs = dict.fromkeys((BASELINE, *models), Costs(None, None, case.cache_bytes))
    for name, subject in subjects.items():
        costs[name] = Costs(*map(statistics.median, found[name]), subject.state_bytes)
    return costs


def rows(case: Case, parameters: int, costs: dict[str, Costs]) -> tuple[str, str]:
    """The lines of a case in both tables."""
    lines = []
    for way in ("generate", "step"):
        times = {name: getattr(cost, way) for name, cost in costs.items()}
        cells = [f"{parameters / 1e6:.1f}M", str(case.batch), f"{case.length:,}"]
        cells += ["—" if one is None else f"{case.batch / one:,.0f}" for one in times.values()]
        cells += [
            "—" if None in (times[BASELINE], one) else f"{one / times[BASELINE]:.2f}"
            for one in (times[name] for name in OURS)
        ]
        cells += [f"{costs[name].state_bytes / 2**10:,.0f}" for name in ("flurka", BASELINE)]
        lines.append(table_row(cells))
    return lines[0], lines[1]


def page(lines: Sequence[tuple[str, str]], command: str, cases: int) -> str:
    """Both tables and what they are of; cases: that the command asks for, of which some may not be measured yet."""
    columns = ["parameters", "texts", "tokens before", BASELINE, *OURS.values()]
    columns += [f"{name}: times the cost" for name in OURS.values()] + [
        "FLuRKA's state, KiB",
        "KV cache, KiB",
    ]
    text = [
        *opening("Decoding beside `transformers`", command),
        "Tokens per CPU second of all texts of a batch, greedily, float32, medians of turns that the models take one "
        "after the other in one process. `transformers` is its `LlamaForCausalLM` with SDPA and a `DynamicCache`; "
        "softmax is the same model of ours, FLuRKA the preset `flurka`. Sizes: "
        + " and ".join(f"{one.layers} layers × {one.width}, {one.heads} heads" for one in SIZES)
        + f", SwiGLU, byte tokens. Times the cost: CPU time of a token over that of `transformers`; at most "
        f"{WANTED} is wanted of FLuRKA behind {LENGTHS[0]:,} tokens. No prompt is read: caches hold random numbers. "
        f"— : the KV cache is larger than {LARGEST / 2**30:.0f} GiB.",
        *(["", f"The first {len(lines)} of {cases} cases."] if len(lines) < cases else []),
        "",
        "## `generate`",
        "",
        "With choosing the token and, of ours, writing its text.",
        "",
        *table(columns, [line for line, _ in lines]),
        "## A step of the model alone",
        "",
        *table(columns, [line for _, line in lines]),
    ]
    return "\n".join(text)


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens before")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=BATCHES, help="texts that are continued together"
    )
    parser.add_argument("--turns", type=int, default=5, help="of each model in each case")
    options = parser.parse_args()
    command = typed("decoding", sys.argv[1:])
    models = {sizes: ({name: own_model(name, sizes) for name in OURS}, llama(sizes)) for sizes in SIZES}
    cases = [
        Case(sizes, batch, length)
        for batch, sizes, length in product(options.batches, SIZES, options.lengths)
    ]
    lines = []
    for case in cases:
        own_models, theirs = models[case.sizes]
        parameters = sum(weight.numel() for weight in theirs.parameters())
        lines.append(rows(case, parameters, measure(case, own_models, theirs, options.turns)))
        print(*lines[-1], sep="\n", file=sys.stderr)
        # A file has what there is so far, should the rest take too long.
        if options.out is not None or len(lines) == len(cases):
            give(page(lines, command, len(cases)), options.out)


if __name__ == "__main__":
    main()
