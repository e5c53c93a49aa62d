"""The labelled tasks that `--source` names: the Long Range Arena's, GLUE's, and the sparsity task."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from data_pipeline.generated import Generated, GeneratedTask
from data_pipeline.glue import TASKS as GLUE
from data_pipeline.glue import Glue
from data_pipeline.lra.image import Image
from data_pipeline.lra.listops import ListOps, PublishedListOps
from data_pipeline.lra.pathfinder import Pathfinder
from data_pipeline.lra.text import Retrieval, Text
from data_pipeline.sources import Source
from data_pipeline.sparsity import Sparsity
from data_pipeline.spec import make, options_of
from megakernel.config.errors import UserError, nearest_first

OPTION = "--source"

GENERATED: dict[str, type[GeneratedTask]] = {task.NAME: task for task in (ListOps, Pathfinder, Sparsity)}
READ: dict[str, Callable[[str], Source]] = {
    "lra:listops": PublishedListOps,
    "lra:text": Text,
    "lra:retrieval": Retrieval,
    "lra:image": Image,
    **{f"glue:{task}": partial(Glue, task) for task in GLUE},
}


def open_benchmark(spec: str, seed: int, workers: int) -> Source:
    """The source of `lra:TASK...`, `glue:TASK:WHERE` or `sparsity[:OPTIONS]`.

    What is made takes options key=value,... and depends on seed; what is read takes a folder or hf:NAME; lra:listops
    takes either. Raises UserError for a task that is none of them, for wrong options, and for folders that do not
    hold it.
    """
    family, _, rest = spec.partition(":")
    task, _, where = rest.partition(":")
    name, rest = (family, rest) if family == "sparsity" else (f"{family}:{task}", where)
    is_read = name in READ and bool(rest) and ("=" not in rest or Path(rest).is_dir())
    if name in GENERATED and not is_read:
        texts = options_of(name, rest, OPTION) if rest else {}
        return Generated(make(GENERATED[name], name, texts, OPTION), seed, workers)
    if name not in READ:
        raise UserError(f"--source {spec} is no task; choose {nearest_first(name, (*GENERATED, *READ))}")
    return READ[name](rest)
