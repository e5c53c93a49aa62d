"""Training commands: run as one process of an existing world, or start one on this machine.

`providers` passes to the training package what it needs from packages above it.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from launch import local, notifications
from launch.arguments import Number, add_config_arguments, allow_change_options
from launch.environment import launched_process
from launch.exit_status import ExitStatus
from launch.messages import ignore_write_errors
from launch.slurm.job_folder import JobFolder
from launch.slurm.restarting import describe
from megakernel.checkpoint.trained_run import finished_message
from megakernel.config import (
    Config,
    RunFailed,
    UserError,
    check_recorded_run,
    data_parallel_size,
    in_recorded_order,
)
from megakernel.config.errors import report_write_errors
from megakernel.config.extras import lacking, need
from megakernel.config.notify import Event
from megakernel.config.resume import check_allowed
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.parallel.ranks import Ranks
from megakernel.training import events
from megakernel.training.data import check_corpora
from megakernel.training.process import run_in_mesh
from megakernel.training.run_folder import RunLock, refuse_links
from megakernel.training.stop_requests import block_stop_signals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from data_pipeline.tokenizers import Tokenizer
    from megakernel.model import LanguageModel
    from megakernel.model.layer_inputs import LayerInputs
    from megakernel.training.observing.observer import Providers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare CONFIG, its overrides and --nproc."""
    add_config_arguments(parser)
    parser.add_argument(
        "--nproc",
        type=Number(int, maximum=1_000),
        metavar="N",
        help="processes to start on this machine, one per GPU (default 1); not under torchrun or srun",
    )


def run(args: argparse.Namespace, config: Config, allowed: Sequence[str] = ()) -> int:
    """Check the configuration against the world size, then train as one process or start the processes.

    allowed: keys of the run that may change at this start.
    """
    process = launched_process()
    nproc = 1 if args.nproc is None else args.nproc
    world_size = nproc if process is None else process.world_size
    if world_size < 1 or args.nproc not in (None, world_size):
        raise UserError(
            f"--nproc {args.nproc} is not possible; leave it out under torchrun and srun, else give 1 or more"
        )
    data_parallel_size(config, world_size)
    if config.logging.analysis_every is not None:
        need(f"logging.analysis_every={config.logging.analysis_every}", "matplotlib")
    for tracker in config.logging.trackers:
        need(f"logging.{tracker}", tracker)
    if _tells(config, process):
        notifications.check(config.logging.notify, "logging.notify")
    if process is None:
        return _start(config, args, world_size, allowed)
    args.run_folder = config.run.folder  # `main` writes the traceback of an unexpected error to its logs
    block_stop_signals()
    ignore_write_errors("stdout")  # training continues without a console
    os.environ.update(process.variables())  # DeepSpeed and torch.distributed read them
    return train(config, process, allowed)


def _start(config: Config, args: argparse.Namespace, world_size: int, allowed: Sequence[str]) -> int:
    refuse_links(config.run.folder)
    if check_recorded_run(config, allowed):  # here an error is printed once, later by every rank
        RunLock(config.run.folder)  # raises InUse before the logs are touched; the ranks take their own lock
        if (done := finished_message(config)) is not None:  # known without importing the libraries
            print(done)
            return 0
    # Before the run's folder is made; an up-training always evaluates.
    check_corpora(config, Ranks(), config.uptrain is not None or config.training.eval_samples > 0)
    logs = config.run.folder / "logs"
    with report_write_errors("run.root", config.run.root):
        logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "launch.cli", args.command, args.config, *args.overrides]
    command += allow_change_options(allowed)
    processes = f"{world_size} process{'es' * (world_size > 1)}"
    with suppress(OSError):  # printed at once, as importing the libraries takes seconds
        os.write(1, f"{args.command}: starting {processes}, logs in {logs}\n".encode())
    env = {**os.environ, **local.import_variables(), notifications.WATCHED: "1"}
    known = len(JobFolder(config.run.folder).events()) if _tells(config, None) else None
    status = local.run_ranks(command, world_size, logs, env=env)
    if known is not None:
        _tell_end(config, status, known=known)
    return status


def _tells(config: Config, process: ProcessEnvironment | None) -> bool:
    """Whether this process tells the run's events: not in a job, whose batch script does, nor below `_start`."""
    is_told = events.in_job() or notifications.WATCHED in os.environ
    return config.logging.notify is not None and not is_told and (process is None or process.rank == 0)


def _tell_end(config: Config, status: int, why: str = "", known: int = 0) -> None:
    """Tell that the run has ended, as logging.notify says.

    why: what failed; empty: the failure that the ranks have recorded after the `known` events of the folder.
    """
    folder = config.run.folder
    training = JobFolder(folder).training
    event: Event = "end"
    reason = describe(status)
    if status == ExitStatus.STOPPED:
        reason = "saved and stopped by a signal; the same command continues"
    elif status not in (ExitStatus.DONE, ExitStatus.TERMINATED):
        recorded = [one for one in JobFolder(folder).events()[known:] if one["event"] == "failed"]
        failures = [f"rank {one.get('rank')} on {one.get('host')}: {one.get('why')}" for one in recorded]
        event, reason = "failure", "; ".join(filter(None, (reason, why, *failures[:1])))
    message = notifications.Notification.of(event, folder, training, reason, folder / "logs")
    notifications.send(config.logging.notify, message, lambda line: print(line, flush=True))


def train(config: Config, process: ProcessEnvironment, allowed: Sequence[str] = ()) -> int:
    """Train until the last step (of the last stage, with an uptrain section) or a request to stop.

    allowed: keys of the run that may change at this start, without an uptrain section.
    Returns the exit status (0, 85 or 143). Raises UserError for what the user can fix.
    """

    def work(mesh) -> int:
        ranks = Ranks.of(mesh)
        ranks.on_rank_zero(lambda: check_allowed(allowed, config))
        ordered = ranks.on_rank_zero(lambda: in_recorded_order(config))
        if config.uptrain is None:
            from megakernel.training.trainer import Trainer

            return Trainer(ordered, mesh, providers(), allowed=allowed).run().exit_status
        from megakernel.uptraining.run import Uptraining
        from megakernel.uptraining.stages import check_stages

        check_stages(config, process.world_size)
        status = Uptraining(ordered, mesh, providers()).run()
        if status == 0 and mesh.rank == 0:
            _write_report_page(config.run.folder)
        return status

    if not _tells(config, process):
        return run_in_mesh(config, process, work)
    try:
        status = run_in_mesh(config, process, work)
    except BaseException as error:
        is_plain = isinstance(error, (UserError, RunFailed))
        _tell_end(config, ExitStatus.FAILED, str(error) if is_plain else f"{type(error).__name__}: {error}")
        raise
    _tell_end(config, status)
    return status


def _write_report_page(folder: Path) -> None:
    """Write an up-training's report as an HTML page, if what draws it is installed."""
    if line := lacking("uptrain_report.html", "matplotlib", "markdown"):
        print(line, flush=True)
        return
    from megakernel.analysis.uptraining_page import write_page

    print(f"report: {write_page(folder)}", flush=True)


def providers() -> "Providers":
    """Constructors of the objective's model, attention plots and text samples, for `Trainer` and `Uptraining`."""
    from megakernel.training.observing.observer import Providers
    from megakernel.uptraining.objectives import model_maker

    return Providers(model_maker, _attention_figures, _sampler)


def _attention_figures(model: "LanguageModel", inputs: "LayerInputs", draw: bool) -> "dict[str, Figure]":
    # Imported here because runs without plots do not need matplotlib.
    from megakernel.analysis.plots.live import attention_figures

    return attention_figures(model, inputs, draw=draw)


def _sampler(config: Config, tokenizer: "Tokenizer") -> "Callable[[LanguageModel], str]":
    from megakernel.generation import Samples

    return Samples(config, tokenizer).markdown
