"""The batch script of a submission: a template of slurm/ with its placeholders filled."""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch import shipped
from megakernel.config import UserError
from megakernel.config.cluster import Cluster
from megakernel.training.environment import recorded_variables

from .job_folder import SECRETS
from .restarting import RESTART_IN_JOB
from .staging import COMPLETE

Value = str | int | float | bool

INDEX = "%a"
"""Stands for the member's index in an array's overrides and arguments, as in Slurm's file name patterns."""


@dataclass(frozen=True)
class Script:
    """The contents of a batch script."""

    template: str
    """Name of a file in slurm/, without `.sbatch`."""

    cluster: Cluster

    run: Path
    """Folder of the run, absolute; for an array the members' folders without `-INDEX`."""

    submission: str
    """Name of the submission's folder in `run`/submissions."""

    command: Sequence[str]
    """Arguments of `megakernel`, in which `$submission` is the submission's folder and, in arrays, INDEX the index."""

    array: str | None = None
    """Indices of an array in Slurm's syntax, optionally followed by `%K` for at most K at a time."""

    options: Mapping[str, str] = field(default_factory=dict)
    """More options of sbatch, such as dependency."""

    chain: int = 1
    """Number of jobs, one after another, that continue the run."""

    def text(self) -> str:
        """The whole script. Raises UserError if the template is missing."""
        cluster = self.cluster
        index = "-$SLURM_ARRAY_TASK_ID" if self.array else ""
        placeholders = {
            "directives": "\n".join(_directive(key, value) for key, value in self.directives().items()),
            "run": shlex.quote(str(self.run)) + index,
            "submission": self.submission,
            "python": shlex.quote(sys.executable),
            "environment": "".join([*_variables(cluster), *_divided_cores(cluster)]),
            "setup": "".join(f"{line}\n" for line in cluster.setup),
            "stage": "" if cluster.stage is None else _STAGE.format(folder=_in_double_quotes(cluster.stage)),
            "unstage": "" if cluster.stage is None else _unstage(cluster.stage),
            "tasks": str(cluster.tasks_per_node),
            "restart_in_job": str(RESTART_IN_JOB),
            "srun": " ".join(_srun_options(cluster)),
            "python_command": " ".join(_python_command(cluster)),
            "preflight_mib": str(cluster.preflight_mib),
            "preflight_limit": str(_preflight_limit(cluster)),
            "command": " ".join(_quoted(word, self.array is not None) for word in self.command),
        }
        return re.sub(r"\{\{(\w+)\}\}", lambda match: placeholders[match[1]], _template(self.template))

    def directives(self) -> dict[str, Value]:
        """sbatch's options by their long names."""
        cluster = self.cluster
        log = "%A_%a.log" if self.array else "%j.log"
        if "\\" in str(self.run):
            raise UserError(
                f"{self.run}: Slurm writes no log below a folder with a backslash; choose another"
            )
        # sbatch's patterns can express the members' folders because only the index differs.
        run = str(self.run).replace("%", "%%") + ("-%a" if self.array else "")
        options: dict[str, Value | None] = {
            "job-name": self.run.name,
            "nodes": cluster.requested_nodes,
            "no-kill": cluster.survives_losses,
            "ntasks-per-node": cluster.tasks_per_node,
            "gpus-per-node": cluster.gpus or None,
            **{key: getattr(cluster, key) for key in _SAME_NAME},
            "requeue" if cluster.requeues(self.chain) else "no-requeue": True,
            "signal": f"USR2@{cluster.signal_delay}",
            "array": self.array,
            **self.options,
            # Otherwise a job whose parent failed would stay pending forever.
            "kill-on-invalid-dep": "yes",
            "chdir": str(Path.cwd()),
            "output": f"{run}/logs/{log}",
            "open-mode": "append",
            **cluster.sbatch,
        }
        if cluster.fewer_nodes:
            # With --ntasks-per-node, Slurm 22.05 gives the least number of nodes, also if all are idle. A job without
            # it has one task per node, which gets the cores of all; the script divides them.
            options["ntasks-per-node"] = None
            if options.get("cpus-per-gpu") is None:
                options["cpus-per-task"] = cluster.tasks_per_node * int(options.get("cpus-per-task") or 1)
        return {key: value for key, value in options.items() if value is not None and value is not False}


def _preflight_limit(cluster: Cluster) -> int:
    """Seconds after which the preflight is ended: more than its own timeouts add up to (`collectives.timeout`)."""
    return 600 + (cluster.world_size + cluster.spares * cluster.tasks_per_node) // 4


_SAME_NAME = (
    *("time", "partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation", "mem"),
)
"""Keys of `Cluster` that are options of sbatch by the same name."""


def _variables(cluster: Cluster) -> Iterator[str]:
    """Lines that set the job's variables; of possibly secret ones the script shows only the names."""
    known = recorded_variables(cluster.environment)
    for name, value in known.items():
        yield f"export {name}={shlex.quote(value)}\n"
    if secrets := [name for name in cluster.environment if name not in known]:
        yield f"set -a  # {' '.join(secrets)}\n# shellcheck source=/dev/null\n"
        yield f'. "$submission/{SECRETS}" || exit\nset +a\n'


def _divided_cores(cluster: Cluster) -> Iterator[str]:
    """The line that divides the cores of a job without a number of tasks."""
    if cluster.fewer_nodes:
        tasks = cluster.tasks_per_node
        yield f"export SLURM_CPUS_PER_TASK=$((${{SLURM_CPUS_PER_TASK:-{tasks}}} / {tasks}))\n"


# A node on which this fails is no reason to end the job: its processes read what they would read without staging.
_STAGE = """\
    # To each node's own disk, once: Python, its packages and the code, which processes start from.
    "$python" -m launch.slurm.staging pack "$submission"
    limit=900 step_tasks=1 step "$nodes" "$python" -m launch.slurm.staging unpack "$submission" --folder {folder} \\
        >"$logs/staging.log" 2>&1
    echo "== staged on $(grep -c ': staged' "$logs/staging.log") nodes ($logs/staging.log)"
    grep -v ': staged' "$logs/staging.log"
"""

# What is left after a minute, or when the job is killed first, the next job on the node deletes.
_UNSTAGE = """\
limit=60 step_tasks=1 step "$nodes" bash -c {remove} >>"$logs/staging.log" 2>&1
"""


def _unstage(folder: str) -> str:
    root = f'"{folder}/megakernel-$SLURM_JOB_ID"'
    return _UNSTAGE.format(remove=_in_double_quotes(f"rm -f {root}/{COMPLETE}; rm -rf {root}"))


# Its arguments: Python and the code where they are without staging, and Python's arguments.
_STAGED_PYTHON = """root={folder}/megakernel-$SLURM_JOB_ID
code=$1
shift
if [[ -e $root/{complete} ]]; then
    export PYTHONPATH=$root/code${{PYTHONPATH#"$code"}}
    exec "$root/environment/bin/python" "$@"
fi
exec "$0" "$@\""""


def _directive(key: str, value: Value) -> str:
    # sbatch and the shell end a directive at the end of the line, even within quotes.
    if not str(value).isprintable():
        raise UserError(f"{key}={value!r} has a character that cannot be printed; write it on one plain line")
    return f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}"


def _template(name: str) -> str:
    path = shipped.folder("slurm") / f"{name}.sbatch"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} is missing; install Megakernel again") from None


def _srun_options(cluster: Cluster) -> list[str]:
    # Since Slurm 22.05 srun no longer inherits this from the job.
    options = ["${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"]
    container = cluster.container
    if container is not None and container.runtime == "pyxis":
        options += [f"--container-image={shlex.quote(container.image)}"]
        if container.mounts:
            options += [f"--container-mounts={shlex.quote(','.join(container.mounts))}"]
        options += ['--container-workdir="$PWD"']
    return options


def _python_command(cluster: Cluster) -> list[str]:
    """The words that start Python in the run's processes."""
    container = cluster.container
    if container is None and cluster.stage is not None:
        start = _STAGED_PYTHON.format(folder=cluster.stage, complete=COMPLETE)
        return ["bash", "-c", _in_double_quotes(start), '"$python"', '"$submission/code"']
    if container is None:
        return ['"$python"']
    if container.runtime == "pyxis":  # srun starts inside the container
        return ["python"]
    if container.runtime == "enroot":
        return [
            *("bash", "-c", _in_double_quotes((_GPUS if cluster.gpus_per_node else "") + _ENROOT), "enroot"),
            *(f"--mount={shlex.quote(_enroot_mount(mount))}" for mount in container.mounts),
            *(
                shlex.quote(container.image),
                "bash",
                "-c",
                _in_double_quotes('cd "$0" && exec "$@"'),
                '"$PWD"',
                "python",
            ),
        ]
    binds = [f"--bind={shlex.quote(mount)}" for mount in container.mounts]
    return ["apptainer", "exec", "--nv", *binds, shlex.quote(container.image), "python"]


# The job's variables, which enroot alone leaves out, except those that belong to the image. Without them a process
# would not know its rank. Texts of several lines have no place in enroot's file of variables.
_ENROOT = """keep=()
for name in $(compgen -e); do
    case $name in
    PATH | LD_* | HOME | PYTHONHOME | BASH_ENV | ENROOT_*) ;;
    *) [[ ${!name} == *$'\\n'* ]] || keep+=(--env "$name") ;;
    esac
done
exec enroot start --rw "${keep[@]}" "$@\""""

_GPUS = """export NVIDIA_VISIBLE_DEVICES=${NVIDIA_VISIBLE_DEVICES:-all}
export NVIDIA_DRIVER_CAPABILITIES=${NVIDIA_DRIVER_CAPABILITIES:-compute,utility}
"""
"""What NVIDIA's hook of enroot needs to bring driver and devices; an image need not say it."""


def _in_double_quotes(text: str) -> str:
    """A shell word that expands nothing; unlike single quotes it does not look as if it should."""
    return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'


def _enroot_mount(mount: str) -> str:
    """SOURCE:TARGET[:FLAGS] as a line of enroot's mounts, which creates the target as pyxis does."""
    source, _, rest = mount.partition(":")
    target, _, flags = rest.partition(":")
    return ":".join([source, target or source, ",".join(["x-create=auto,rbind", *filter(None, [flags])])])


def _quoted(word: str, is_array: bool) -> str:
    """A quoted shell word in which only `$submission` and, in arrays, the index are expanded."""
    expanded = {"$submission": '"$submission"'} | ({INDEX: '"$SLURM_ARRAY_TASK_ID"'} if is_array else {})
    parts = re.split("(" + "|".join(map(re.escape, expanded)) + ")", word)
    return "".join(expanded.get(part) or shlex.quote(part) for part in parts if part) or "''"
