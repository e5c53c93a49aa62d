"""Training speed compared with the same model in `transformers`: a Llama with SDPA and torch's fused AdamW.

    OMP_NUM_THREADS=1 python -m benchmarks.training_speed --out benchmarks/results/training_speed_cpu.md

    OMP_NUM_THREADS=1 python -m benchmarks.training_speed --compile --lengths 1024 --turns 3

Our models run in the engine of `megakernel pretrain`, with softmax and with the default FLuRKA. All have the same
sizes, sequences, dtype and gradient clipping. Each trains in its own process, and the processes take turns, so that
other load on the machine affects all of them. On a CPU the times are CPU time of the process; on a GPU they are wall
clock time, and models are in bfloat16. --compile adds our models with compiled layers (`training.compile: layer`),
which are compiled before the first turn.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.page import command_line, page_parser, table_page, table_row, write_page
from benchmarks.training_runs import benchmark_config
from megakernel.config import Config, Parallel

BASELINE = "transformers"
MODELS = {BASELINE: "transformers", "softmax": "softmax", "flurka": "FLuRKA"}
"""Model -> its name on the page; our models are presets of model.attention."""

COMPILED = " compiled"
"""Ends the names of our models with compiled layers."""

WITH_COMPILED = MODELS | {
    f"{preset}{COMPILED}": f"{MODELS[preset]}, compiled" for preset in ("softmax", "flurka")
}

LENGTHS = (512, 4096, 16384)
TARGETS = {"softmax": (1, 1, 1), "flurka": (1, 2, 6)}
"""Targets at LENGTHS, as multiples of the baseline's speed."""

LEARNING_RATE = 3e-4
WARMUP_STEPS = 2
"""Warm-up steps, in which memory is first touched and optimizer moments are made."""

TOKENS = 4096
"""Minimum tokens of a turn: several steps of short sequences."""

ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"


class StepSizes(NamedTuple):
    """Sizes that all models share."""

    length: int
    batch_size: int
    layers: int = 4
    width: int = 256
    heads: int = 4
    inner: int = 768
    vocab_size: int = 4096


class Turn(NamedTuple):
    """Several steps of one model."""

    seconds: float
    """Mean seconds per step."""

    loss: float
    """Loss of the last step, in nats."""


def configuration(name: str, sizes: StepSizes) -> Config:
    """A configuration of our model of this name, with one document per sequence."""
    attention, compiles = name.removesuffix(COMPILED), name.endswith(COMPILED)
    model = {"num_layers": sizes.layers, "hidden_size": sizes.width, "num_heads": sizes.heads}
    batch = {"global_batch_size": sizes.batch_size, "micro_batch_size": sizes.batch_size}
    return benchmark_config(
        {**model, "ffn_hidden_size": sizes.inner, "attention": attention},
        {"seq_len": sizes.length, **batch, "dtype": DTYPE, "compile": "layer" if compiles else "none"},
        data={"isolate_documents": False},
    )


def our_step(config: Config, sizes: StepSizes) -> Callable[[], float]:
    """A function that trains our model for one step and returns the loss."""
    from megakernel.parallel import Mesh, prepare_device
    from megakernel.parallel.processes import ProcessEnvironment

    mesh = Mesh.create(Parallel(), ProcessEnvironment(), prepare_device("auto", 0))
    from benchmarks.real_runs import random_batch
    from megakernel.model.settings import model_settings
    from megakernel.training.engine import Engine

    engine = Engine(config, model_settings(config, mesh, sizes.vocab_size))
    batch = random_batch(config, sizes.vocab_size, mesh)
    return lambda: engine.train_step([batch], LEARNING_RATE).loss


def llama(sizes: StepSizes) -> LlamaForCausalLM:
    """The same model in `transformers`."""
    model = llama_like(configuration("softmax", sizes), sizes.vocab_size, sizes.length)
    return model.to("cuda" if ON_GPU else "cpu")


def llama_like(config: Config, vocab_size: int, positions: int, **more: Any) -> LlamaForCausalLM:
    """A Llama with the sizes of our configuration and SDPA. more: other keys of LlamaConfig."""
    sizes = {
        "hidden_size": config.model.hidden_size,
        "intermediate_size": config.model.ffn_size,
        "num_hidden_layers": config.model.num_layers,
        "num_attention_heads": config.model.num_heads,
        "max_position_embeddings": positions,
    }
    how = {"tie_word_embeddings": True, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes, **how, **more))


def baseline_step(sizes: StepSizes) -> Callable[[], float]:
    """A function that trains the Llama for one step, as the Trainer of `transformers` does, and returns the loss."""
    model = llama(sizes).train()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes.vocab_size, (sizes.batch_size, sizes.length), generator=draw).to(
        model.device
    )

    def step() -> float:
        # The weights stay float32, as ours have float32 master weights.
        with torch.autocast(model.device.type, torch.bfloat16, enabled=ON_GPU):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _worker(model: str, sizes: StepSizes, pipe: Connection) -> None:
    """The main function of a process: receive numbers of steps, train, send a Turn; 0 ends it."""
    step = baseline_step(sizes) if model == BASELINE else our_step(configuration(model, sizes), sizes)
    clock = time.perf_counter if ON_GPU else time.process_time
    for _ in range(WARMUP_STEPS):
        step()
    pipe.send(None)
    while steps := pipe.recv():
        start = clock()
        for _ in range(steps):
            loss = step()  # returns a Python float, which synchronizes with the device
        if ON_GPU:
            torch.cuda.synchronize()
        pipe.send(Turn((clock() - start) / steps, loss))


def measure(sizes: StepSizes, turns: int, models: Iterable[str] = MODELS) -> dict[str, list[Turn]]:
    """Train each model for this many turns."""
    spawning = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for model in models:
        pipes[model], end = spawning.Pipe()
        spawning.Process(target=_worker, args=(model, sizes, end), daemon=True).start()
        end.close()
        pipes[model].recv()  # before the next one starts
    results: dict[str, list[Turn]] = {model: [] for model in pipes}
    for _ in range(turns):
        for model, pipe in pipes.items():
            pipe.send(max(1, TOKENS // (sizes.batch_size * sizes.length)))
            results[model].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(0)
    for process in multiprocessing.active_children():
        process.join()
    return results


def row(sizes: StepSizes, results: dict[str, list[Turn]]) -> str:
    """The table row of one length."""
    times = {model: statistics.median(turn.seconds for turn in turns) for model, turns in results.items()}
    cells = [
        f"{sizes.length:,}",
        *(f"{sizes.batch_size * sizes.length / one:,.0f}" for one in times.values()),
    ]
    for model in _compared(results):
        targets = TARGETS.get(model)
        target = f" ({targets[LENGTHS.index(sizes.length)]})" if targets and sizes.length in LENGTHS else ""
        cells.append(f"{times[BASELINE] / times[model]:.2f}{target}")
    return table_row(cells)


def _compared(models: Iterable[str]) -> list[str]:
    """Those that have a column of speeds relative to the baseline."""
    return [model for model in models if model != BASELINE]


def page(rows: Sequence[str], sizes: StepSizes, command: str, models: Mapping[str, str] = MODELS) -> str:
    """The page: explanation and table. models: those of the rows."""
    relative = (models[model] + " (target)" * (model in TARGETS) for model in _compared(models))
    columns = ["tokens of a sequence", *models.values(), *relative]
    text = (
        f"{sizes.layers} layers × {sizes.width}, {sizes.heads} heads, SwiGLU of {sizes.inner}, "
        f"{sizes.vocab_size:,} ids, tied embeddings, {DTYPE}, {sizes.batch_size} sequence(s) of one document a step. "
        f"The first columns are tokens per {'second' if ON_GPU else 'CPU second'} of whole steps (forward, backward, "
        "clipping, AdamW), medians of turns that the models take one after the other; the last are times the speed of "
        "`transformers`, whose `LlamaForCausalLM` has SDPA and torch's fused AdamW, as its Trainer has by default. "
        "Ours is the engine of `megakernel pretrain` with its defaults."
    )
    return table_page("Training compared with `transformers`", command, text, columns, rows)


def main() -> None:
    """Measure and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a sequence")
    parser.add_argument("--batch-size", "--rows", type=int, default=1, help="sequences of a step")
    parser.add_argument("--turns", type=int, default=5, help="turns of each model at each length")
    parser.add_argument("--compile", action="store_true", help="also our models with compiled layers")
    options = parser.parse_args()
    models = WITH_COMPILED if options.compile else MODELS
    sizes = [StepSizes(length, options.batch_size) for length in options.lengths]
    rows = [row(one, measure(one, options.turns, models)) for one in sizes]
    write_page(page(rows, sizes[0], command_line("training_speed"), models), options.out)


if __name__ == "__main__":
    main()
