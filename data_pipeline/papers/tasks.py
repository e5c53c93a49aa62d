"""The labeled tasks of `--source`: Long Range Arena, GLUE, and the sparsity task."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from data_pipeline.papers.generated import Generated, GeneratedTask
from data_pipeline.papers.glue import TASKS as GLUE
from data_pipeline.papers.glue import Glue
from data_pipeline.papers.lra.image import Image
from data_pipeline.papers.lra.listops import ListOps, PublishedListOps
from data_pipeline.papers.lra.pathfinder import Pathfinder
from data_pipeline.papers.lra.spam import Mails
from data_pipeline.papers.lra.text import MovieReviews, Retrieval
from data_pipeline.papers.sparsity import Sparsity
from data_pipeline.sources import DocumentSource
from data_pipeline.spec import build, parse_options
from megakernel.config.errors import UserError, nearest_first

OPTION = "--source"

GENERATED: dict[str, type[GeneratedTask]] = {task.NAME: task for task in (ListOps, Pathfinder, Sparsity)}
PUBLISHED: dict[str, Callable[[str], DocumentSource]] = {
    "lra:listops": PublishedListOps,
    "lra:text": MovieReviews,
    "lra:spam": Mails,
    "lra:retrieval": Retrieval,
    "lra:image": Image,
    **{f"glue:{task}": partial(Glue, task) for task in GLUE},
}


def open_benchmark(spec: str, seed: int, workers: int) -> DocumentSource:
    """The source of `lra:TASK...`, `glue:TASK:WHERE` or `sparsity[:OPTIONS]`.

    Generated tasks take options key=value,... and depend on the seed; published ones take a folder or hf:NAME;
    lra:listops takes either. Raises UserError for an unknown task, wrong options, or a folder that does not hold the
    task.
    """
    family, _, rest = spec.partition(":")
    task, _, where = rest.partition(":")
    name, rest = (family, rest) if family == "sparsity" else (f"{family}:{task}", where)
    is_published = name in PUBLISHED and bool(rest) and ("=" not in rest or Path(rest).is_dir())
    if name in GENERATED and not is_published:
        options = parse_options(name, rest, OPTION) if rest else {}
        return Generated(build(GENERATED[name], name, options, OPTION), seed, workers)
    if name not in PUBLISHED:
        raise UserError(
            f"--source {spec} is not a task; choose {nearest_first(name, (*GENERATED, *PUBLISHED))}"
        )
    return PUBLISHED[name](rest)
