"""A job in a container that enroot starts, and requests for nodes of several kinds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.submitting import last, losses, megakernel, scontrol, submit, until_state

FOLDERS = ("etc", "tmp", "proc", "sys", "dev", "run", "root", "var/lib")
LINKS = ("bin", "sbin", "lib", "lib64")


@pytest.fixture
def image(place, tmp_path):
    """A squashfs image without files of its own, and the folders of this machine that a run in it needs."""
    missing = [name for name in ("enroot", "mksquashfs", "squashfuse") if shutil.which(name) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed: github.com/NVIDIA/enroot, apt-get install squashfs-tools"
        )
    root = tmp_path / "root"
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
    for name in LINKS:
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group"):
        shutil.copy(f"/etc/{name}", root / "etc")
    # The image's own variables, among them where its Python is: here that of the tests.
    (root / "etc/environment").write_text(f"PATH={Path(sys.executable).parent}:/usr/bin:/bin\n")
    file = tmp_path / "image.sqsh"
    subprocess.run(["mksquashfs", root, file, "-noappend", "-quiet"], check=True, capture_output=True)
    folders = {"/usr", "/tmp", sys.prefix, sys.base_prefix, str(place), str(Path(__file__).parents[2])}
    return file, sorted(folders)


@pytest.mark.second
def test_a_job_of_two_nodes_trains_in_an_image_that_enroot_starts(image):
    file, folders = image
    Path("boxed.yaml").write_text(
        f"gpus_per_node: 0\npreflight_mib: 1\nsbatch: {{ntasks-per-node: 2}}\n"
        f"container: {{runtime: enroot, image: {file}, mounts: {[f'{one}:{one}' for one in folders]}}}\n"
    )
    submit("run.yaml --name boxed -N 2 training.steps=3 --cluster boxed.yaml")
    done = until_state("boxed", "COMPLETED", "FAILED")
    log = megakernel("logs boxed --rank all").out + megakernel("logs boxed --rank batch").out
    assert (done["state"], list(losses("boxed"))) == ("COMPLETED", [1, 2, 3]), log
    assert last("boxed", "started")["nodes"] == "n[1-2]"
    assert "4 x cpu, data 4" in log
    assert "== the slowest all-reduce between two nodes takes" in log, "the preflight runs in it, too"


@pytest.fixture
def two_kinds_of_nodes(place):
    for node, kind in (("n1", "rack1"), ("n2", "rack2")):
        scontrol("update", f"NodeName={node}", f"AvailableFeatures={kind}", f"ActiveFeatures={kind}")
    yield
    for node in ("n1", "n2"):
        scontrol("update", f"NodeName={node}", "AvailableFeatures=", "ActiveFeatures=")


@pytest.mark.parametrize(
    ("constraint", "nodes"), [("[rack1*1&rack2*1]", "n[1-2]"), ("rack2|rack3", "n2"), ("[rack1|rack2]", "n1")]
)
def test_constraints_for_nodes_of_several_kinds_reach_slurm_as_written(constraint, nodes, two_kinds_of_nodes):
    count = 2 if "*" in constraint else 1
    said = megakernel(f"submit run.yaml -N {count} -C {constraint} --test-only")
    if "rack3" in constraint:  # a feature that no node has
        assert said.status == 4
        assert f"constraint={constraint}: Slurm refuses the job (" in said.err
        assert "Invalid feature specification" in said.err
        assert "rack1, rack2" in said.err
    else:
        assert said.status == 0, said.err
        assert f"on nodes {nodes} in partition low" in said.out
