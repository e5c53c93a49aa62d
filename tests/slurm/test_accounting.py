"""A cluster with an accounting database, which refuses unknown accounts; other modules use clusters without one."""

import pytest

from launch.slurm.states import accounting_states
from tests.slurm.submitting import megakernel, submit, until, until_state

pytestmark = pytest.mark.second

ACCOUNTING = True


@pytest.mark.parametrize(
    ("words", "reason", "remedy"),
    [
        ("-A nosuch", "account=nosuch: Slurm refuses the job (Invalid account", "sacctmgr show associations"),
        ("-q nosuch", "qos=nosuch: Slurm refuses the job (Invalid qos", "sacctmgr show qos"),
    ],
)
def test_an_unknown_account_is_refused(words, reason, remedy, place):
    said = megakernel("submit run.yaml", words)
    assert said.status == 4
    (line,) = said.err.splitlines()
    assert reason in line
    assert remedy in line
    assert not (place / "runs").exists()


def test_the_database_knows_how_a_job_ended(place):
    (failed,) = submit("--name failed -A research -- evaluate runs/nosuch")
    (held,) = submit("--name cancelled -A research --sbatch hold -- evaluate runs/nosuch")
    assert megakernel("cancel cancelled").status == 0
    until_state("failed", "FAILED")
    wanted = {failed: "FAILED", held: "CANCELLED"}

    def known():
        return {job: state.state for job, state in accounting_states(["sacct", "-X"], list(wanted)).items()}

    until(lambda: known() == wanted)
