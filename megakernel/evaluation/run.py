"""From `--task` and a run folder to what is measured: what is cheap to check comes before the libraries are loaded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from data_pipeline.corpus import Corpora
from data_pipeline.spec import check_known, kind_of, make, split
from data_pipeline.synthetic import TASKS
from megakernel.checkpoint.trained_run import TrainedRun
from megakernel.config import UserError
from megakernel.config.section import Section
from megakernel.parallel.device import choose_device

from .answers import AnswersTask
from .language_modelling import LanguageModelling, Options, check_length, evaluated_config
from .result import Evaluation
from .subject import OnPass, Result, Task, find, opened

OPTION = "--task"
LM = "lm"

KINDS: Mapping[str, type[Section]] = {LM: Options, **TASKS}
"""Name -> options."""

SAMPLES = 64
"""Examples of each length where nothing else is said."""


def parse(
    specs: Sequence[str], samples: int | None = None, seq_len: int | None = None, draws: int | None = None
) -> list[Task]:
    """The tasks of a command line; samples are of all of them, seq_len and draws of lm.

    Raises UserError for a task, an option or a value that does not exist, and for seq_len and draws without lm.
    """
    tasks = [_parse(spec, samples, seq_len, draws) for spec in dict.fromkeys(specs)]
    if not any(isinstance(task, LanguageModelling) for task in tasks):
        if seq_len is not None:
            raise UserError(
                f"--seq-len {seq_len} is of lm alone; write {OPTION} {specs[0].split(':')[0]}:length={seq_len}"
            )
        if draws is not None:
            raise UserError(f"--draws {draws} is of lm alone; leave it out, or add {OPTION} lm")
    return tasks


def _parse(spec: str, samples: int | None, seq_len: int | None, draws: int | None) -> Task:
    name, texts = split(spec, OPTION)
    kind = kind_of(name, KINDS, OPTION)
    if name == LM:
        options = make(Options, name, texts, OPTION)
        given = {"samples": samples, "seq_len": seq_len, "draws": draws}
        changes = {key: value for key, value in given.items() if getattr(options, key) is None}
        return LanguageModelling(spec, options.model_copy(update=changes))
    task = TASKS[name]
    check_known(name, texts, [*kind.model_fields, "samples"], OPTION)
    if "samples" in texts:
        samples = _whole(name, "samples", texts.pop("samples"))
    lengths = texts.pop("length", "").split("+")
    at_lengths = [make(task, name, {**texts, **({"length": one} if one else {})}, OPTION) for one in lengths]
    return AnswersTask(spec, tuple(at_lengths), SAMPLES if samples is None else samples)


def _whole(name: str, key: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{OPTION} {name}:{key}={text} is no whole number; write {key}=64")
    return int(text)


def evaluate_tasks(
    folder: Path,
    specs: Sequence[str],
    *,
    step: int | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    draws: int | None = None,
    data: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda spec, done, total: None,
) -> Iterator[tuple[str, Result]]:
    """Measure tasks of one checkpoint one after the other, in this process; each with its spec as it is done.

    Args:
        folder: folder of the run, or one in the Hugging Face form.
        specs: `NAME` or `NAME:key=value,...`, of `KINDS`.
        step: which checkpoint; None takes the newest good one.
        samples: samples of lm and examples of each length of others, where a spec does not say.
        seq_len, draws: as for `evaluate_run`, of lm.
        data: a prepared folder in place of the run's.
        progress: called after each forward pass with the task's spec, the passes done and all passes of the task.

    Raises:
        UserError: before anything is measured, for a run, a checkpoint, a task or an option that does not exist, and
            for tasks and runs that do not fit each other.
    """
    tasks = parse(specs, samples, seq_len, draws)
    return _measure(folder, tasks, step, progress, data)


def evaluate_run(
    folder: Path,
    *,
    step: int | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    draws: int | None = None,
    split: str = "validation",
    progress: OnPass = lambda done, total: None,
) -> Evaluation:
    """Evaluate a checkpoint on its run's validation data, in this process.

    Args:
        folder: folder of the run.
        step: which checkpoint; None takes the newest good one.
        samples: validation samples; None takes training.eval_samples. One pass over the corpora at most.
        seq_len: tokens per sample, also more than in training; None takes training.eval_seq_len, else
            training.seq_len.
        draws: average the predicted probabilities over this many draws of the noise that training redraws; None
            takes the draw that training held last.
        split: which split of the validation corpora, such as test.
        progress: called after each batch with the batches done and all batches.

    With the defaults the loss is the eval/loss that training measured at that step.

    Raises:
        UserError: no run, no such checkpoint, no corpus, or values that do not fit them.
    """
    task = LanguageModelling("lm", Options(samples=samples, seq_len=seq_len, draws=draws, split=split))
    [(_, result)] = _measure(folder, [task], step, lambda spec, done, total: progress(done, total))
    assert isinstance(result, Evaluation)
    return result


def _measure(
    folder: Path,
    tasks: Sequence[Task],
    step: int | None,
    progress: Callable[[str, int, int], None],
    data: Path | None = None,
) -> Iterator[tuple[str, Result]]:
    source = find(folder, step, any(task.reads_text for task in tasks), data)
    for task in tasks:
        task.check(source)
    subject = opened(source)
    for task in tasks:
        yield task.spec, task.measure(subject, partial(progress, task.spec))


def evaluate_baseline(
    folder: Path,
    name: str,
    *,
    weights: Path | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    progress: OnPass = lambda done, total: None,
) -> Evaluation:
    """Evaluate a model of `transformers` of the run's sizes on the run's validation data, in this process.

    Args:
        folder: folder of the run that it is compared with.
        name: one of `baselines.NAMES`.
        weights: folder of `save_pretrained`; None leaves the model untrained.
        samples, seq_len, progress: as for `evaluate_run`.

    Raises:
        UserError: as `evaluate_run` does, for a name or a run that do not fit each other, and for other weights.
    """
    from .baselines import build_baseline, check_baseline, measure_baseline

    config = evaluated_config(TrainedRun.find(folder).config, samples, seq_len)
    check_baseline(name, config)
    corpora = Corpora(config.data)
    check_length(config, corpora)
    device = choose_device("cpu" if config.training.device == "cpu" else "auto")
    from data_pipeline.loader import ValidationBatches
    from data_pipeline.order import Share

    batches = ValidationBatches(config, corpora, Share())
    model = build_baseline(name, config, corpora.vocab_size, weights).to(device)
    tokens, loss, accuracy = measure_baseline(model, batches, device, progress)
    return Evaluation(
        run=name if weights is None else str(weights),
        step=0,
        samples=batches.samples,
        seq_len=config.training.seq_len,
        tokens=tokens,
        loss=loss,
        bits_per_byte=None,
        accuracy=accuracy,
        by_position=[],
    )
