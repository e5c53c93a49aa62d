"""`megakernel logs` on the files of ended jobs."""

import pytest

from launch.cli import main
from launch.slurm.job_folder import Job, JobFolder


@pytest.fixture
def logs(tmp_path):
    run = JobFolder(tmp_path / "run")
    folder = run.logs("999999999", 0)
    folder.mkdir(parents=True)
    run.add([Job("999999999", "local", "s", "")])
    return folder


@pytest.mark.parametrize("options", [[], ["--follow"]])
def test_a_last_line_without_a_newline_is_shown(options, logs, tmp_path, capsys):
    (logs / "rank_0.log").write_text("step 1\nSegmentation fault")
    assert main(["logs", str(tmp_path / "run"), *options]) == 0
    assert capsys.readouterr().out == "step 1\nSegmentation fault\n"


@pytest.mark.parametrize("option", [["--restart", "1"], ["--stderr"]])
def test_options_without_effect_on_the_log_of_the_batch_script_are_refused(option, logs, tmp_path, refused):
    said = refused("logs", tmp_path / "run", "--rank", "batch", *option)
    assert f"{' '.join(option)} has no effect with --rank batch" in said


def test_logs_of_all_ranks_are_in_the_order_of_ranks(logs, tmp_path, capsys):
    for rank in ("10", "2", "0", "2.old"):
        (logs / f"rank_{rank}.log").write_text("done\n")
    assert main(["logs", str(tmp_path / "run"), "--rank", "all"]) == 0
    assert capsys.readouterr().out == "[0] done\n[2] done\n[10] done\n[2.old] done\n"
