"""Running the tasks of `--task` on a run folder; cheap checks come before heavy libraries are imported."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from data_pipeline.spec import build, check_options, find_class, split_spec
from data_pipeline.synthetic import TASKS
from megakernel.config import Training, UserError
from megakernel.config.section import Section

from .answers import AnswersTask
from .harness import LM_EVAL, HarnessOptions, HarnessTask
from .language_modelling import LanguageModelling, Options
from .result import Evaluation
from .subject import ContinueTexts, OnPass, Task, TaskResult, find_run, load_run
from .translation import TRANSLATION, Translate, TranslationOptions, TranslationTask

OPTION = "--task"
LM = "lm"

KINDS: Mapping[str, type[Section]] = {LM: Options, TRANSLATION: TranslationOptions, **TASKS}
"""Task name -> class of its options, without those of the harness."""

SAMPLES = 64
"""Default number of examples per length."""


def parse(
    specs: Sequence[str],
    samples: int | None = None,
    seq_len: int | None = None,
    draws: int | None = None,
    include_path: Path | None = None,
    continue_texts: ContinueTexts | None = None,
    translate: Translate | None = None,
) -> list[Task]:
    """The tasks of a command line; samples is a default for all of them, seq_len and draws for lm.

    include_path and continue_texts are for tasks of lm-evaluation-harness, translate for translation. Raises UserError
    for an unknown task, an invalid option or value, and seq_len, draws or include_path without such a task.
    """
    tasks = [
        HarnessTask.parse(spec, samples, include_path, continue_texts)
        if spec.partition(":")[0] == LM_EVAL
        else _parse(spec, samples, seq_len, draws, translate)
        for spec in dict.fromkeys(specs)
    ]
    if include_path is not None and not any(isinstance(task, HarnessTask) for task in tasks):
        raise UserError(
            f"--include-path {include_path} applies only to {LM_EVAL}; leave it out, or add {OPTION} {LM_EVAL}:NAME"
        )
    if not any(isinstance(task, LanguageModelling) for task in tasks):
        if seq_len is not None:
            remedy = f"write {OPTION} {specs[0].split(':')[0]}:length={seq_len}"
            if isinstance(tasks[0], (HarnessTask, TranslationTask)):
                remedy = "leave it out"
            raise UserError(f"--seq-len {seq_len} applies only to lm; {remedy}")
        if draws is not None:
            raise UserError(f"--draws {draws} applies only to lm; leave it out, or add {OPTION} lm")
    return tasks


def _parse(
    spec: str, samples: int | None, seq_len: int | None, draws: int | None, translate: Translate | None
) -> Task:
    kinds: Mapping[str, type[Section]] = {**KINDS, LM_EVAL: HarnessOptions}
    kind = find_class(spec.partition(":")[0], kinds, OPTION)
    name, option_texts = split_spec(spec, OPTION)
    if name == LM:
        options = build(Options, name, option_texts, OPTION)
        defaults = {"samples": samples, "seq_len": seq_len, "draws": draws}
        missing = {key: value for key, value in defaults.items() if getattr(options, key) is None}
        return LanguageModelling(spec, options.model_copy(update=missing))
    if name == TRANSLATION:
        wanted = build(TranslationOptions, name, option_texts, OPTION)
        wanted = wanted if wanted.samples is not None else wanted.model_copy(update={"samples": samples})
        return TranslationTask(spec, wanted, translate)
    task = TASKS[name]
    check_options(name, option_texts, [*kind.model_fields, "samples"], OPTION)
    if "samples" in option_texts:
        samples = _parse_int(name, "samples", option_texts.pop("samples"))
    texts = [option_texts]
    if "length" in option_texts:
        texts = [
            {**option_texts, "length": length} for length in dict.fromkeys(option_texts["length"].split("+"))
        ]
    at_lengths = [build(task, name, of_length, OPTION) for of_length in texts]
    return AnswersTask(spec, tuple(at_lengths), SAMPLES if samples is None else samples)


def _parse_int(name: str, key: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{OPTION} {name}:{key}={text} is not a whole number; write {key}=64")
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
    include_path: Path | None = None,
    continue_texts: ContinueTexts | None = None,
    translate: Translate | None = None,
    progress: Callable[[str, int, int], None] = lambda spec, done, total: None,
) -> Iterator[tuple[str, TaskResult]]:
    """Measure tasks on one checkpoint in this process; yields each spec with its result as soon as it is done.

    A spec has those of samples, seq_len and draws that differ from the run's: the names of two measurements differ.

    Args:
        folder: a run folder, or one in Hugging Face format.
        specs: `NAME` or `NAME:key=value,...`, with names from `KINDS`, or `lm_eval:NAME` of lm-evaluation-harness.
        step: step of the checkpoint; None takes the newest good one.
        samples: default of samples for lm, and of examples per length for other tasks.
        seq_len, draws: defaults for lm, as in `evaluate_run`.
        data: a prepared folder to use instead of the run's.
        include_path: folder of further tasks of lm-evaluation-harness.
        continue_texts: what generates text for its tasks; None: those that generate are refused.
        translate: what translates for translation; None: that is refused.
        progress: called after each forward pass with the task's spec, the passes done and all passes of the task.

    Raises:
        UserError: before anything is measured, for an unknown run, checkpoint, task or option, and for tasks that the
            run does not support.
    """
    tasks = parse(specs, samples, seq_len, draws, include_path, continue_texts, translate)
    given = {"samples": samples, "seq_len": seq_len, "draws": draws}
    return _measure(folder, tasks, step, progress, data, given)


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
        step: step of the checkpoint; None takes the newest good one.
        samples: validation samples; None takes training.eval_samples. One pass over the corpora at most.
        seq_len: tokens per sample, also more than in training; None takes training.eval_seq_len, else
            training.seq_len.
        draws: average the predicted probabilities over this many draws of the noise that training redraws; None
            takes the checkpoint's noise.
        split: split of the validation corpora, such as test.
        progress: called after each batch with the batches done and all batches.

    With the defaults the loss is the eval/loss that training measured at that step.

    Raises:
        UserError: for no run, checkpoint or corpus, or values that do not fit them.
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
    given: Mapping[str, int | None] = MappingProxyType({}),
) -> Iterator[tuple[str, TaskResult]]:
    source = find_run(folder, step, [task.split for task in tasks if task.split is not None], data)
    for task in tasks:
        task.check(source)
    subject = load_run(source)
    for task in tasks:
        spec = _complete_spec(task, source.config.training, given)
        yield spec, task.measure(subject, partial(progress, task.spec))


def _complete_spec(task: Task, training: Training, given: Mapping[str, int | None]) -> str:
    """A task's spec and the options beside it that make another measurement of it than without them."""
    defaults: dict[str, int | None] = {"samples": training.eval_samples}
    if isinstance(task, LanguageModelling):
        defaults |= {"seq_len": training.evaluation_len, "draws": None}
    elif isinstance(task, AnswersTask):
        defaults["samples"] = SAMPLES
    elif isinstance(task, HarnessTask):
        defaults["samples"] = None
    written = task.spec.replace(":", ",").split(",")
    added = [
        f"{key}={value}"
        for key, default in defaults.items()
        if (value := given.get(key)) not in (None, default)
        and not any(item.startswith(f"{key}=") for item in written)
    ]
    return ",".join([task.spec if ":" in task.spec or not added else f"{task.spec}:{added.pop(0)}", *added])
