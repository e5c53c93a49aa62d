"""Cost of a decoded token, compared with a Llama of `transformers` with SDPA and a KV cache; greedy decoding.

    OMP_NUM_THREADS=1 python -m benchmarks.decoding --out benchmarks/results/decoding_cpu.md

Our models run through the engine of `megakernel generate`, the Llama through `generate`; a second table has a step of
each model alone, without sampling and detokenization. All have the same sizes, in float32, in one process of one
thread, and take turns, so that other load on the machine affects all of them; times are CPU time of that process.

No prompt is read: states and caches have the size that a prompt leaves, and random contents.
"""

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

from benchmarks.page import command_line, page_header, page_parser, table, table_row, write_page
from benchmarks.training_runs import benchmark_config
from benchmarks.training_speed import BASELINE, llama_like
from data_pipeline.tokenizers import ByteTokenizer
from megakernel.config import Config
from megakernel.generation import GenerationEngine, Sampling, TextRequest
from megakernel.generation.decoding import Decoder
from megakernel.generation.engine import TextState
from megakernel.model import LanguageModel
from megakernel.model.settings import model_settings
from megakernel.ops.softmax_attention import SoftmaxState
from megakernel.parallel import OneProcess

OURS = {"flurka": "FLuRKA", "softmax": "softmax"}
"""Preset of model.attention -> its name on the page."""

LENGTHS = (1024, 4096, 16384, 65536)
BATCHES = (1, 8)
TARGET_COST = 1.3
"""Target at the first of LENGTHS: FLuRKA's cost of a token is at most this multiple of the baseline's."""

TURN_TOKENS = 64
"""Tokens of a turn: one block of FLuRKA, whose last token costs more than the others."""

TURN_SECONDS = 1.0
"""Seconds after which a turn ends early, but not before MIN_TURN_TOKENS tokens."""

MIN_TURN_TOKENS = 4

MAX_CACHE_BYTES = 2**30
"""Largest KV cache that is allocated, in bytes."""

TOKENIZER = ByteTokenizer()
GREEDY = Sampling(temperature=0.0)
LAST_TOKEN = 65
"""The token that decoding continues from."""


class ModelSizes(NamedTuple):
    """Sizes that all models share."""

    layers: int
    width: int
    heads: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers in float32."""
        return 2 * 4 * self.layers * self.width


SIZES = (ModelSizes(4, 128, 4), ModelSizes(8, 384, 6))
"""The sizes of configs/demo.yaml, and those of a model of 14 million parameters."""


class DecodingCase(NamedTuple):
    """A batch of texts that are continued together, each after `length` tokens."""

    sizes: ModelSizes
    batch: int
    length: int

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of all texts."""
        return self.batch * self.length * self.sizes.bytes_per_token


class Continuation(NamedTuple):
    """A model with the state or cache of a case's texts; each call continues from there."""

    generate: Callable[[int], float]
    """Continue every text by this many tokens; returns CPU seconds per step (one token of every text)."""

    step: Callable[[int], float]
    """The same for the model alone."""

    state_bytes: int


def configuration(attention: str, sizes: ModelSizes) -> Config:
    """A configuration of our model."""
    model = {"num_layers": sizes.layers, "hidden_size": sizes.width, "num_heads": sizes.heads}
    return benchmark_config({**model, "attention": attention}, {"seq_len": LENGTHS[-1]})


def our_model(attention: str, sizes: ModelSizes) -> LanguageModel:
    """Our model, untrained."""
    settings = model_settings(configuration(attention, sizes), OneProcess(), TOKENIZER.vocab_size)
    return LanguageModel(settings).eval()


def llama(sizes: ModelSizes) -> LlamaForCausalLM:
    """The same model in `transformers`."""
    no_special_ids = {"bos_token_id": None, "eos_token_id": None}
    config = configuration("softmax", sizes)
    return llama_like(config, TOKENIZER.vocab_size, 2 * LENGTHS[-1], **no_special_ids).eval()


def our_session(model: LanguageModel, case: DecodingCase) -> Continuation:
    """Our model with the state of a case's texts."""
    decoders = [_decoder_after(model, case.length, seed) for seed in range(case.batch)]

    def generate(tokens: int) -> float:
        engine = GenerationEngine(model, TOKENIZER, isolate_documents=False, max_batch=case.batch)
        for decoder in decoders:
            # Requests join one per step: with this many tokens, none has ended by the last timed step.
            most = tokens + case.batch + 1
            engine.add(
                TextRequest(
                    [LAST_TOKEN], most, GREEDY, previous=TextState(_copy(decoder), [], [], case.length)
                )
            )
        for _ in decoders:
            engine.step()
        return _seconds(engine.step, tokens)

    def step(tokens: int) -> float:
        together = _copy(decoders[0])
        for decoder in decoders[1:]:
            together.append(decoder)
        return _seconds(lambda: together.read([[LAST_TOKEN]] * case.batch).argmax(-1).tolist(), tokens)

    leaves = pytree.tree_leaves([decoder.states for decoder in decoders])
    return Continuation(generate, step, sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)))


def _copy(decoder: Decoder) -> Decoder:
    """A decoder at the same position, sharing the tensors, which nothing changes in place."""
    other = copy.copy(decoder)
    other.positions = list(decoder.positions)
    return other


def _decoder_after(model: LanguageModel, length: int, seed: int) -> Decoder:
    """A decoder in the state after a text of `length` tokens."""
    draw = torch.Generator().manual_seed(seed)
    decoder = Decoder(model, TOKENIZER.eod, isolate_documents=False)
    decoder.read([torch.randint(256, (2 * TURN_TOKENS,), generator=draw).tolist()])
    assert decoder.states is not None
    decoder.states = [
        SoftmaxState(*(torch.randn(*x.shape[:2], length, x.shape[3], generator=draw) for x in state))
        if isinstance(state, SoftmaxState)
        else state
        for state in decoder.states
    ]
    decoder.positions = [length]
    return decoder


def baseline_session(model: LlamaForCausalLM, case: DecodingCase) -> Continuation:
    """The Llama with the KV cache of a case's texts."""
    draw = torch.Generator().manual_seed(0)
    sizes, batch, length = case
    shape = (batch, sizes.heads, length, sizes.width // sizes.heads)
    cache = DynamicCache()
    for layer in range(sizes.layers):
        cache.update(torch.randn(shape, generator=draw), torch.randn(shape, generator=draw), layer)
    token_ids = torch.randint(256, (batch, length + 1), generator=draw)

    def rewind() -> None:
        if more := cache.get_seq_length() - length:
            cache.crop(-more)

    def generate(tokens: int) -> float:
        rewind()
        how = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return _seconds(lambda: model.generate(token_ids, past_key_values=cache, **how), 1) / tokens

    @torch.inference_mode()
    def step(tokens: int) -> float:
        rewind()
        last = token_ids[:, -1:]
        return _seconds(lambda: model(last, past_key_values=cache).logits.argmax(-1).tolist(), tokens)

    kept = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None)
    return Continuation(generate, step, kept)


def _seconds(step: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


class Costs(NamedTuple):
    """Median CPU seconds per step of a session; None if its cache is larger than MAX_CACHE_BYTES."""

    generate: float | None
    step: float | None
    state_bytes: int


def measure(
    case: DecodingCase, models: dict[str, LanguageModel], llama_model: LlamaForCausalLM, turns: int
) -> dict[str, Costs]:
    """The costs of each model in a case."""
    builders: dict[str, Callable[[], Continuation]] = {BASELINE: lambda: baseline_session(llama_model, case)}
    builders |= {name: lambda model=model: our_session(model, case) for name, model in models.items()}
    if case.cache_bytes > MAX_CACHE_BYTES:
        del builders[BASELINE], builders["softmax"]
    sessions = {name: build() for name, build in builders.items()}
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in sessions}
    tokens = {
        name: min(max(int(TURN_SECONDS / session.step(2)), MIN_TURN_TOKENS), TURN_TOKENS)
        for name, session in sessions.items()
    }
    for _ in range(turns):
        for name, session in sessions.items():
            for times, function in zip(seconds[name], (session.generate, session.step)):
                times.append(function(tokens[name]))
    costs = dict.fromkeys((BASELINE, *models), Costs(None, None, case.cache_bytes))
    for name, session in sessions.items():
        costs[name] = Costs(*map(statistics.median, seconds[name]), session.state_bytes)
    return costs


def rows(case: DecodingCase, parameters: int, costs: dict[str, Costs]) -> tuple[str, str]:
    """A case's row in both tables."""
    lines = []
    for function in ("generate", "step"):
        times = {name: getattr(cost, function) for name, cost in costs.items()}
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
    """The page with both tables. cases: how many the command asks for; some may not be measured yet."""
    columns = ["parameters", "texts", "tokens before", BASELINE, *OURS.values()]
    columns += [f"{name}: times the cost" for name in OURS.values()] + [
        "FLuRKA's state, KiB",
        "KV cache, KiB",
    ]
    text = [
        *page_header("Decoding compared with `transformers`", command),
        "Tokens per CPU second of all texts of a batch, greedy decoding, float32, medians of turns that models take "
        "one after the other in one process. `transformers` is its `LlamaForCausalLM` with SDPA and a `DynamicCache`; "
        "softmax is the same model in Megakernel, FLuRKA the preset `flurka`. Sizes: "
        + " and ".join(f"{one.layers} layers × {one.width}, {one.heads} heads" for one in SIZES)
        + f", SwiGLU, byte tokens. Times the cost: CPU time of a token over that of `transformers`; at most "
        f"{TARGET_COST} is the target for FLuRKA after {LENGTHS[0]:,} tokens. No prompt is read: caches hold random "
        f"numbers. — : the KV cache is larger than {MAX_CACHE_BYTES / 2**30:.0f} GiB.",
        *(["", f"The first {len(lines)} of {cases} cases."] if len(lines) < cases else []),
        "",
        "## `generate`",
        "",
        "With sampling and, for our models, detokenization.",
        "",
        *table(columns, [line for line, _ in lines]),
        "## A step of the model alone",
        "",
        *table(columns, [line for _, line in lines]),
    ]
    return "\n".join(text)


def main() -> None:
    """Measure and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="tokens before the decoded ones"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=BATCHES, help="texts that are continued together"
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of each model in each case")
    options = parser.parse_args()
    command = command_line("decoding")
    models = {sizes: ({name: our_model(name, sizes) for name in OURS}, llama(sizes)) for sizes in SIZES}
    cases = [
        DecodingCase(sizes, batch, length)
        for batch, sizes, length in product(options.batches, SIZES, options.lengths)
    ]
    lines = []
    for case in cases:
        our_models, llama_model = models[case.sizes]
        parameters = sum(weight.numel() for weight in llama_model.parameters())
        lines.append(rows(case, parameters, measure(case, our_models, llama_model, options.turns)))
        print(*lines[-1], sep="\n", file=sys.stderr)
        # A file is written after every case, in case the run is interrupted.
        if options.out is not None or len(lines) == len(cases):
            write_page(page(lines, command, len(cases)), options.out)


if __name__ == "__main__":
    main()
