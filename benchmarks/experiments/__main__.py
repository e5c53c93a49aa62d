"""Run one study: prepare its data, train and evaluate its models, and write the page.

    OMP_NUM_THREADS=1 python -m benchmarks.experiments far_context --only local flurka --out far_context.md
    python -m benchmarks.experiments --list

NAME is a study of benchmarks/experiments, or another YAML file. Models are trained by `megakernel pretrain` or
`uptrain` in runs/NAME and measured by `megakernel evaluate`. The same command again resumes stopped runs and only reads
what is there. `section.key=value` overrides the configuration of all models, but not of one that others are up-trained
from. No page is written if a run fails or a check of the study does not hold.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.page import command_line, page_parser, run_main, write_page
from megakernel.config import RunFailed, UserError
from megakernel.config.errors import nearest_first

from .checks import CHECKS
from .page import page, result_row
from .runs import RunOptions, StudyResult, StudyRun, check_names, make_run, prepare, train
from .study import LoadedStudy, names, read_study


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = page_parser(__doc__ or "")
    parser.add_argument("study", nargs="?", metavar="NAME", help="the study")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of all models")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="models (default: the study's)")
    parser.add_argument("--variants", nargs="+", metavar="V", help="variants (default: as the study says)")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="S", help="seeds (default: the study's)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=int, metavar="N", help="training tokens of each model")
    length.add_argument("--steps", type=int, metavar="N", help="training steps: training.steps=N")
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="processes of a training (default: the study's)"
    )
    parser.add_argument(
        "--list", action="store_true", help="list all studies, or the models and variants of one"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.study is None and not arguments.list:
        parser.error("name a study, or list them with --list")
    return arguments


def listing(name: str | None) -> str:
    """All studies with their titles, or the models, variants and tasks of one."""
    if name is None:
        return "\n".join(f"{name}: {read_study(name).study.title}" for name in names())
    loaded = read_study(name)
    study = loaded.study
    lines = [study.title, f"models: {', '.join(loaded.models)}"]
    if study.only:
        lines.append(f"without --only: {', '.join(study.only)}")
    if list(study.variants) != [""]:
        lines.append(f"variants: {', '.join(study.variants)}")
    return "\n".join([*lines, *(f"task {name}: {task}" for name, task in study.tasks.items())])


def chosen(option: str, wanted: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """The wanted names, or all. Raises UserError for an unknown one."""
    known = list(known)
    for name in wanted or ():
        if name not in known:
            raise UserError(f"{option} {name} is not in this study; choose {nearest_first(name, known)}")
    return list(wanted or known)


def planned_runs(study: LoadedStudy, arguments: argparse.Namespace) -> list[StudyRun]:
    """The runs that the command line names, with valid configurations."""
    keys = study.study
    steps = [] if arguments.steps is None else [f"training.steps={arguments.steps}"]
    options = RunOptions((*arguments.overrides, *steps), arguments.tokens)
    models = chosen("--only", arguments.only or keys.only, study.models)
    variants = chosen("--variants", arguments.variants, keys.variants)
    if arguments.variants is None and not keys.all_variants:
        variants = variants[:1]
    seeds = keys.seeds if arguments.seeds is None else arguments.seeds
    runs = [
        make_run(study, model, variant, seed, options)
        for variant in variants
        for seed in seeds
        for model in models
    ]
    check_names(runs)
    return runs


def measure_all(runs: Sequence[StudyRun], nproc: int) -> tuple[list[StudyResult], list[str]]:
    """Train and evaluate all runs; returns the results, and why runs failed. A failed run does not stop the others."""
    results: list[StudyResult] = []
    failures = []
    for run in runs:
        try:
            prepare(run)
            for result in train(run, nproc):
                if result.key not in {other.key for other in results}:
                    results.append(result)
                    print(result_row(run.study, [result], results), flush=True)
        except (UserError, RunFailed) as error:
            failures.append(f"{run}: {error}")
            print(failures[-1], file=sys.stderr, flush=True)
    return results, failures


def write_plots(study: LoadedStudy, results: Sequence[StudyResult], page_file: Path) -> None:
    """Write the plots that the study names next to its page."""
    if study.study.curves is None and study.study.scatter is None:
        return
    # Needs matplotlib, which few studies do.
    from .plots import write_curves, write_scatter

    if study.study.curves is not None:
        write_curves(results, study.study.curves, page_file)
    if study.study.scatter is not None:
        write_scatter(study, results, page_file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; returns 1 if no page could be written."""
    arguments = parse(argv)
    if arguments.list:
        print(listing(arguments.study))
        return 0
    study = read_study(arguments.study)
    runs = planned_runs(study, arguments)
    os.environ |= study.study.environment
    nproc = arguments.nproc or study.study.nproc
    results, failures = measure_all(runs, nproc)
    if not failures:
        failures = [reason for check in study.study.checks for reason in CHECKS[check](results)]
    if failures:
        print("no page is written:", *failures, sep="\n  ", file=sys.stderr)
        return 1
    write_page(page(study, results, command_line("experiments", argv)), arguments.out)
    if arguments.out is not None:
        write_plots(study, results, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
