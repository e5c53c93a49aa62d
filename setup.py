"""Puts configs/ and slurm/ into wheels; everything else about the package is in setup.cfg.

setup.cfg can only name files inside of packages, and these two folders are at the top of the checkout.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("configs", "slurm")


class BuildWithShippedFiles(build_py):
    """Also copies SHIPPED to launch/shipped/, where launch/shipped.py finds them."""

    def run(self) -> None:
        """Build, and copy unless the install is editable: that reads the checkout."""
        super().run()
        if not self.editable_mode:
            for name in SHIPPED:
                target = Path(self.build_lib, "launch", "shipped", name)
                shutil.rmtree(target, ignore_errors=True)  # of an earlier build: a file may be gone since
                shutil.copytree(name, target)


setup(cmdclass={"build_py": BuildWithShippedFiles})
