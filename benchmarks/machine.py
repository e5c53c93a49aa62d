"""What a result's page says of the machine that it was measured on."""

import os
import platform
from pathlib import Path

import torch


def description() -> str:
    """Processor, threads and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return (
        f"{processor}, {torch.get_num_threads()} thread(s) of {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
