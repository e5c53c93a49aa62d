"""From what `--task` says to a task."""

from collections.abc import Mapping, Sequence

from data_pipeline.spec import check_known, kind_of, make, split
from data_pipeline.synthetic import TASKS
from megakernel.config import UserError
from megakernel.config.section import Section

from .answers import AnswersTask
from .language_modelling import LanguageModelling, Options
from .subject import Task

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
