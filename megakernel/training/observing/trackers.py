"""Experiment trackers: wandb and trackio get what TensorBoard gets, as one run over all restarts.

None of them can fail a run: one that raises is reported in a line and left out. Neither can take points back, so steps
that a run repeats after it went back to a checkpoint are there twice.
"""

import html
import io
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Protocol

from megakernel.config import Config
from megakernel.config.extras import explained
from megakernel.config.training import Trackio, Wandb
from megakernel.training.run_folder import write_atomically

from .histograms import Histogram
from .metrics_writer import StepMetrics, flattened

KEPT = "trackers.json"
"""File in a run's folder with what a restart needs to continue its runs there: tracker -> names and ids."""

_MOST_BUCKETS = 512
"""Of a histogram; both libraries refuse more."""

_SECONDS_TO_UPLOAD = 120.0
"""Longest time that the end of a run waits for wandb's server; what is left stays on disk."""


class _Tracker(Protocol):
    """One run in a tracker."""

    kept: Mapping[str, str]
    """What a restart needs to continue it."""

    shown_at: str
    """Where to see it, for one line of the log."""

    def log(self, step: int, entry: StepMetrics) -> None:
        """Send the metrics of one step."""

    def close(self, failed: bool) -> None:
        """Send what is left, and end the run there."""


class Trackers:
    """The trackers of logging.wandb and logging.trackio, on rank 0 only."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        note: Callable[[str], None],
        name: str | None = None,
        stop: Callable[[], object] | None = None,
    ):
        """folder: keeps `KEPT` and wandb's files.

        name: of the runs, such as `uptraining/1-transfer`, whose first part is their group; None: run.name.
        note: prints a line. stop: called from another thread if the run is stopped on a tracker's page.
        """
        self._note = note
        self._running: dict[str, _Tracker] = {}
        name = config.run.name if name is None else name
        for key, settings in config.logging.trackers.items():
            with self._reported(key):
                kept = _kept(folder).get(key, {})
                start: _Tracker
                if isinstance(settings, Wandb):
                    start = _WandbRun(settings, config, folder, name, kept, note, stop)
                else:
                    start = _TrackioRun(settings, config, name, kept, note)
                self._running[key] = start
                if start.kept != kept:
                    write_atomically(
                        folder / KEPT, json.dumps(_kept(folder) | {key: start.kept}, indent=1) + "\n"
                    )
                note(f"{key}: {start.shown_at}")

    def write(self, step: int, entry: StepMetrics) -> None:
        """Send the metrics of one step."""
        for key, tracker in list(self._running.items()):
            with self._reported(key):
                tracker.log(step, entry)

    def close(self, failed: bool) -> None:
        """End the runs; failed: mark them so."""
        for key, tracker in list(self._running.items()):
            with self._reported(key):
                tracker.close(failed)
        self._running.clear()

    @contextmanager
    def _reported(self, key: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._running.pop(key, None)
            lacks = explained(f"logging.{key}", error) if isinstance(error, ModuleNotFoundError) else None
            self._note(f"warning: logging.{key} ends here, the run goes on: {lacks or _line(error)}")


def tracked_name(run: Path) -> str | None:
    """The name of the run in a folder, as its trackers show it; None if it has none."""
    with suppress(ValueError):  # the run's next start reports it
        return next((one["name"] for one in _kept(run).values()), None)
    return None


def _kept(folder: Path) -> dict[str, dict[str, str]]:
    file = folder / KEPT
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); remove it to begin new runs there") from None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


class _WandbRun:
    """A run of Weights & Biases. Its charts are over our steps: its own only grow, and a run may go back to some."""

    def __init__(
        self,
        settings: Wandb,
        config: Config,
        folder: Path,
        name: str,
        kept: Mapping[str, str],
        note: Callable[[str], None],
        stop: Callable[[], object] | None,
    ):
        import wandb

        self._wandb = wandb
        # Silent: a login would ask for the key on a terminal.
        mode: Any = settings.mode or wandb.setup(wandb.Settings(silent=True)).settings.mode
        place: dict[str, Any] = {"project": settings.project}
        if settings.entity is not None:
            place["entity"] = settings.entity
        same = all(kept.get(key) == value for key, value in place.items())
        run_id = kept["id"] if same and "id" in kept else uuid.uuid4().hex[:8]
        self.kept: Mapping[str, str] = place | {"id": run_id, "name": name}

        def start(mode: Any) -> Any:
            return wandb.init(
                **place,
                id=run_id,
                name=name,
                group=settings.group or name.partition("/")[0],
                tags=settings.tags or None,
                config=config.model_dump(mode="json"),
                dir=str(folder),
                mode=mode,
                resume="allow" if mode == "online" else None,
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    allow_val_change=True,  # keys may change between starts
                    finish_timeout=_SECONDS_TO_UPLOAD,
                    finish_timeout_raises=True,
                    stop_fn=stop,
                ),
            )

        if mode == "online":
            refusal = "no API key, which `wandb login` stores"
            try:
                if has_key := wandb.login(prompt=False, verify=False):
                    self._run = start(mode)
            except Exception as error:
                has_key, refusal = False, _line(error)
                wandb.teardown()  # its service would still have the id in use
            if not has_key:
                note(f"logging.wandb: {refusal}; it writes offline")
                mode = "offline"
        if mode != "online":
            self._run = start(mode)
        uploads = f"; `wandb sync {folder / 'wandb'}` uploads it"
        self.shown_at = f"{mode}{uploads * (mode == 'offline')}" if mode != "online" else self._run.url
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, entry: StepMetrics) -> None:
        values = _values(entry, self._wandb)
        for tag, text in entry.texts.items():
            values[tag] = self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
        if values:
            self._run.log(values | {"step": step})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _TrackioRun:
    """A run of Trackio."""

    def __init__(
        self,
        settings: Trackio,
        config: Config,
        name: str,
        kept: Mapping[str, str],
        note: Callable[[str], None],
    ):
        import trackio

        self._trackio = trackio
        place = {"project": settings.project}
        if settings.space is not None:
            place["space"] = settings.space
        continues = "id" in kept and all(kept.get(key) == value for key, value in place.items())
        name = kept["name"] if continues else name

        def start(resume: str) -> Any:
            with _quietly():
                return trackio.init(
                    settings.project,
                    name=name,
                    group=settings.group or name.partition("/")[0],
                    space_id=settings.space,
                    config=dict(flattened(config.model_dump(mode="json"))),
                    resume=resume,
                    embed=False,
                )

        if continues:
            try:
                self._run = start("must")
            except ValueError:
                note(
                    f"logging.trackio: project {settings.project} has no run {name} any more; a new one begins"
                )
                continues = False
        if not continues:
            self._run = start("never")
        self.kept: Mapping[str, str] = place | {"id": self._run.id, "name": name}
        if continues and self._run.id != kept["id"]:
            # Trackio continues the newest run of a name.
            self.close(failed=False)
            raise ValueError(
                f"project {settings.project} has a newer run named {name}, which is not this one's; rename one of "
                "them there"
            )
        shown = settings.space or os.environ.get("TRACKIO_SPACE_ID")
        here = f'run {name}; `trackio show --project "{settings.project}"` shows it'
        self.shown_at = f"https://huggingface.co/spaces/{shown}" if shown else here

    def log(self, step: int, entry: StepMetrics) -> None:
        values = _values(entry, self._trackio)
        values |= {tag: self._trackio.Markdown(text) for tag, text in entry.texts.items()}
        if values:
            self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        with _quietly():
            self._trackio.finish()  # not the run's own: the library would finish it again when Python ends


def _quietly() -> redirect_stdout[io.StringIO]:
    """Trackio prints seven lines at each start and one at the end."""
    return redirect_stdout(io.StringIO())


def _values(entry: StepMetrics, library: Any) -> dict[str, Any]:
    """Scalars, histograms and plots by tag, in the classes that both libraries have under the same names."""
    values: dict[str, Any] = dict(entry.scalars)
    for tag, histogram in entry.histograms.items():
        if histogram.counts:
            values[tag] = library.Histogram(np_histogram=buckets(histogram))
    for tag, figure in entry.figures.items():
        from PIL import Image

        png = io.BytesIO()
        figure.savefig(png, format="png")
        values[tag] = library.Image(Image.open(png))
    return values


def buckets(histogram: Histogram) -> tuple[list[int], list[float]]:
    """Counts, and edges, one more; neighbours are added up until there are at most 512 buckets."""
    limits, counts = histogram.limits_and_counts()
    edges = [min(histogram.counts)[0], *limits]
    while len(counts) > _MOST_BUCKETS:
        last = edges[-1]
        counts = [sum(counts[place : place + 2]) for place in range(0, len(counts), 2)]
        edges = [*edges[:-1:2], last]
    return counts, edges
