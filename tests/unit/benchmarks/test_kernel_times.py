"""Times of the kernels on a GPU: what needs none."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels import times
from benchmarks.kernels.times import TileTime, candidates, launches_page, medians, tile_times, tiles_page

REPOSITORY = Path(__file__).parents[3]


def test_each_launch_has_the_median_of_its_runs_without_the_flush():
    events = [("fill", 9.0), ("read", 1.0), ("fill", 9.0), ("read", 3.0), ("fill", 9.0), ("read", 2.0)]
    assert medians(events, 3) == [("read", 2.0)]


def test_runs_with_different_kernels_are_refused():
    with pytest.raises(ValueError, match="let nothing else use the GPU"):
        medians([("fill", 9.0), ("read", 1.0), ("fill", 9.0), ("copy", 1.0)], 2)


def test_candidates_are_tile_sizes_of_one_warpgroup():
    from megakernel.ops.kernels.launcher import TileSizes

    tiles = [TileSizes(*tile) for tile in candidates("read")]
    assert len(set(tiles)) == len(tiles) == 6
    assert {tile.warps for tile in tiles} == {4}
    assert {chunk for chunk, *_ in candidates("write_keys")} == {32, 64}


CHILD = """
import json, sys
for kernel, tile in json.loads(sys.argv[2]):
    if tile == [64, 64, 4, 2]:
        sys.exit("an illegal memory access")
    print(json.dumps([kernel, tile, 0.5, ""]), flush=True)
"""


def test_tiles_after_one_that_crashes_are_tried(monkeypatch):
    monkeypatch.setattr(times, "tiled_kernels", lambda name: ["write_keys"])
    monkeypatch.setattr(times, "CHILD", (sys.executable, "-c", CHILD))
    results = tile_times("FLuRKA d=128")
    assert [result.tile for result in results] == candidates("write_keys")
    (crashed,) = [result for result in results if result.problem]
    assert crashed == TileTime("write_keys", [64, 64, 4, 2], None, "crashed: an illegal memory access")
    page = tiles_page({"FLuRKA d=128": results})
    assert "| write_keys | 64 | 64 | 4 | 1 | 0.500 |" in page
    assert page[-2] == "| write_keys | 64 | 64 | 4 | 2 | crashed: an illegal memory access |"


def test_the_page_adds_launches_up():
    page = launches_page({"kernel elu d=64": [("read", 0.25), ("vectorized<float>", 0.5)]})
    assert "| kernel elu d=64 | 0.750 |" in page
    assert "| kernel elu d=64 | vectorized | 0.500 |" in page


def test_without_a_gpu_it_ends_with_one_line():
    command = [sys.executable, "-m", "benchmarks.kernels.times", "--tiles"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kernel_times: no GPU is here; run it where `nvidia-smi` lists one\n"
