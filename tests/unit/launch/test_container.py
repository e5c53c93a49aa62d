"""The images of slurm/container/: both are built from what a build of the package reads, by one script."""

import re
import subprocess
from pathlib import Path

from megakernel.config.cluster import load_cluster
from megakernel.config.extras import EXTRAS
from tests.e2e.test_wheel import _BUILT_FROM

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "slurm" / "container"
DOCKERFILE, APPTAINER, INSTALL = (
    (FOLDER / name).read_text() for name in ("Dockerfile", "apptainer.def", "install")
)


def test_both_images_begin_with_one_and_run_one_script():
    (base,) = re.findall(r"^FROM (.+)$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^From: (.+)$", APPTAINER, re.MULTILINE) == [base]
    assert "\nRUN slurm/container/install\n" in DOCKERFILE
    assert "\n%post\n    cd /opt/megakernel\n    slurm/container/install\n" in APPTAINER
    assert (FOLDER / "install").stat().st_mode & 0o111


def test_both_are_built_from_what_the_package_is_built_from():
    needed = {*_BUILT_FROM, "constraints.txt"}
    assert (
        set(re.findall(r"^!(.+)$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.MULTILINE)) == needed
    )
    copied = re.findall(r"^    (\S+) /opt/megakernel/(\S+)$", APPTAINER, re.MULTILINE)
    assert {source for source, _ in copied} == needed
    assert all(source == target for source, target in copied)


def test_the_extras_and_the_version_of_torch_are_those_of_the_repository(tmp_path):
    (extras,) = re.findall(r"EXTRAS:=(\S+)}", INSTALL)
    assert set(extras.split(",")) < set(EXTRAS)
    # The lines up to the first installation of pip, with programs that print how they are called.
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    lines = [line for line in INSTALL.splitlines() if not line.startswith(("apt-get", "rm ", "megakernel"))]
    done = subprocess.run(
        ["sh", "-c", "\n".join(lines)],
        cwd=REPOSITORY,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    torch = re.findall(r"^torch==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)[0]
    assert done.stdout.splitlines() == [
        f"-m pip install torch=={torch}",
        f"-m pip install .[{extras}] -c constraints.txt",
        "-m pip check",
    ]


def test_the_cluster_files_image_is_the_one_that_its_lines_build():
    file = REPOSITORY / "configs/cluster/h100-pyxis.yaml"
    container = load_cluster(file, {}).container
    assert container is not None
    tag = re.findall(
        r"docker build -f slurm/container/Dockerfile -t (\S+) \.$", file.read_text(), re.MULTILINE
    )[0]
    assert f"enroot import -o {container.image} dockerd://{tag}\n" in file.read_text()
    assert f"docker build -f slurm/container/Dockerfile -t {tag} .\n" in DOCKERFILE
    page = (REPOSITORY / "docs/slurm.md").read_text()
    assert f"\nenroot import -o {container.image} dockerd://{tag}\n" in page
