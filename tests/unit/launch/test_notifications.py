"""Messages about a run's events, with real servers of HTTP and mail; tests/slurm has those of a real job."""

import os
import subprocess
import sys

import pytest

from launch import notifications
from launch.notifications import Notification, check, send
from launch.shipped import REPOSITORY
from launch.slurm.attempt import Attempt
from launch.slurm.job_folder import SECRETS, JobFolder, Settings, write_settings
from megakernel.config import ConfigError, UserError, validate_section
from megakernel.config.cluster import Cluster
from megakernel.config.notify import Notify
from megakernel.config.training import Logging
from megakernel.training import events
from tests.messages import mail_server, webhook

HOOK = Notify(webhook="RUN_HOOK")


@pytest.fixture
def hook(monkeypatch):
    with webhook() as server:
        monkeypatch.setenv("RUN_HOOK", server.url)
        yield server


def message(tmp_path, event="failure", reason="a rank died"):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "train/loss": 2.34567}\n')
    return Notification.of(event, tmp_path, tmp_path, reason, tmp_path / "logs", job="17", restart=1)


def test_a_webhook_gets_one_json_object_with_run_step_loss_reason_and_log(hook, tmp_path):
    said = []
    send(HOOK, message(tmp_path, reason="a rank\n\x1b[31mdied"), said.append)
    (got,) = hook.received
    facts = {"event": "failure", "run": tmp_path.name, "step": 7, "loss": 2.34567, "job": "17", "restart": 1}
    assert facts.items() <= got.items()
    assert (got["reason"], got["log"]) == ("a rank \\x1b[31mdied", str(tmp_path / "logs"))
    assert got["text"].startswith(f"{tmp_path.name} has failed, step 7, loss 2.3457: a rank ")
    assert str(tmp_path / "logs") in got["text"]
    assert said == []


def test_mail_goes_to_every_address(tmp_path):
    said = []
    with mail_server() as (address, mails):
        send(Notify(mail=["a@x.org", "b@x.org"], mail_server=address), message(tmp_path), said.append)
    (mail,) = mails
    assert f"Subject: {tmp_path.name} has failed" in mail
    assert "To: a@x.org, b@x.org" in mail
    assert "a rank died" in mail
    assert said == []


def test_only_chosen_events_are_told(hook, tmp_path):
    for event in ("end", "failure", "restart", "preemption"):
        send(Notify(webhook="RUN_HOOK", events=["end", "restart"]), message(tmp_path, event), print)
    assert hook.events() == ["end", "restart"]


@pytest.mark.parametrize(
    ("status", "why"), [(404, "the server answers 404 Not Found"), (302, "the server answers 302 Found")]
)
def test_a_server_that_refuses_is_one_line_without_the_url(status, why, hook, tmp_path):
    hook.status = status
    said = []
    send(HOOK, message(tmp_path), said.append)
    (line,) = said
    assert why in line
    assert "t0psecret" not in line
    assert hook.events() == ["failure"], "it is not sent again, to this or another address"


def test_nobody_waits_longer_than_the_timeout_for_a_server_that_does_not_answer(hook, tmp_path, monkeypatch):
    monkeypatch.setattr(notifications, "TIMEOUT", 0.2)
    hook.silent = True
    said = []
    send(HOOK, message(tmp_path), said.append)
    (line,) = said
    assert "by webhook (" in line


def test_what_cannot_be_delivered_is_one_line_for_each_way(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_HOOK", "http://127.0.0.1:9/t0psecret")
    said = []
    with mail_server(refuses="nobody") as (address, mails):
        everyone = Notify(webhook="RUN_HOOK", mail=["a@x.org", "nobody@x.org"], mail_server=address)
        send(everyone, message(tmp_path), said.append)
    assert len(mails) == 1, "the other address gets it"
    assert len(said) == 2
    assert "Connection refused" in said[0]
    assert "refuses nobody@x.org" in said[1]
    assert "t0psecret" not in "".join(said)
    said.clear()
    monkeypatch.delenv("RUN_HOOK")
    send(HOOK, message(tmp_path), said.append)
    assert "the variable RUN_HOOK holds no URL here" in said[0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({}, "webhook=null and mail=[] tell nobody"),
        (
            {"webhook": "https://hooks.slack.com/services/T0/B0/t0psecret"},
            "webhook=https://... is saved with",
        ),
        ({"webhook": "MY-HOOK"}, "webhook=MY-HOOK is no variable's name"),
        ({"mail": ["me"]}, "mail.0=me is no mail address"),
        ({"mail": ["me@x.org"], "mail_server": "smtp://x"}, "mail_server=smtp://x"),
        ({"mail": ["me@x.org"], "events": ["done"]}, "events.0=done"),
        ({"mail": ["me@x.org"], "events": []}, "events=[]"),
        ({"mail": ["me@x.org"], "every": 3}, "every=3 is an unknown key"),
    ],
)
def test_wrong_values_are_refused_in_one_line(wrong, reason):
    with pytest.raises(ConfigError) as caught:
        validate_section(Cluster, {"notify": wrong})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"notify.{reason}")
    assert "t0psecret" not in line
    with pytest.raises(ConfigError) as caught:
        validate_section(Logging, {"notify": wrong}, "logging")
    assert str(caught.value) == f"logging.{line}"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is not set; export RUN_HOOK"),
        ("", "is not set; export RUN_HOOK"),
        ("hooks.slack.com/t0psecret", "holds no URL"),
        ("ftp://x/t0psecret", "holds no URL"),
        ("https:///t0psecret", "holds no URL"),
        ("https://x:99999/t0psecret", "holds no URL"),
        ("https://x/a t0psecret", "holds no URL"),
    ],
)
def test_a_variable_without_a_url_is_refused_without_showing_it(value, reason):
    with pytest.raises(UserError) as caught:
        check(HOOK, "logging.notify", {} if value is None else {"RUN_HOOK": value})
    assert str(caught.value).startswith(f"logging.notify.webhook=RUN_HOOK {reason}")
    assert "t0psecret" not in str(caught.value)
    with pytest.raises(UserError, match="is a variable that logs show"):
        check(Notify(webhook="NCCL_DEBUG"), "notify", {"NCCL_DEBUG": "http://x"})


def submitted(tmp_path, *words, **env):
    typed = [sys.executable, "-m", "launch.cli", "submit", *words]
    variables = {name: value for name, value in os.environ.items() if name != "RUN_HOOK"}
    environment = variables | {"PYTHONPATH": str(REPOSITORY)} | env
    return subprocess.run(typed, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def test_a_job_that_fails_is_told_once_and_the_url_is_in_one_private_file(hook, tmp_path):
    (tmp_path / "mine.yaml").write_text("executor: debug\nnotify: {webhook: RUN_HOOK}\n")
    words = ["--cluster", "mine.yaml", "--name", "one", "--", "reshape", "runs/nosuch"]
    refused = submitted(tmp_path, *words)
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("or leave out the key")
    assert not (tmp_path / "runs").exists()

    submitted(tmp_path, *words, RUN_HOOK=hook.url)
    (got,) = hook.received
    assert (got["event"], got["run"], got["restart"]) == ("failure", "one", 0)
    assert got["reason"].startswith("refused its command line or configuration (runs/nosuch")
    run = JobFolder(tmp_path / "runs/one")
    (job,) = run.jobs()
    secrets = run.submission(job.submission) / SECRETS
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if b"t0psecret" in path.read_bytes()] == [secrets]
    assert run.settings(job).resources.notify == HOOK, "resumed jobs tell, too"


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """A start of a job of the run in `tmp_path`, after those that `earlier` events tell of."""

    def make(*earlier):
        settings = Settings(["pretrain"], Cluster(notify=HOOK).model_dump(mode="json"), "one")
        (tmp_path / "submissions/now").mkdir(parents=True, exist_ok=True)
        write_settings(tmp_path / "submissions/now", settings)
        monkeypatch.setenv(events.JOB_VARIABLE, "7")
        for event, facts in earlier:
            events.record(tmp_path, event, **facts)
        return Attempt(tmp_path / "submissions/now")

    return make


ENDED = {"status": 1, "why": "failed", "step": 0}


@pytest.mark.parametrize(
    ("earlier", "told"),
    [
        ([], []),
        ([("started", {})], ["restart"]),  # the script itself was lost
        ([("started", {}), ("ended", {**ENDED, "restarts": True})], []),  # told when it ended
        ([("started", {}), ("ended", {**ENDED, "restarts": True}), ("requeued", {})], []),
        ([("started", {}), ("ended", {**ENDED, "status": 143})], ["restart"]),  # scontrol requeue
    ],
)
def test_a_restart_by_slurm_itself_is_told_when_the_job_starts_again(earlier, told, attempt, hook):
    attempt(*earlier).record_start("n1")
    assert hook.events() == told


@pytest.mark.parametrize(
    ("status", "event"),
    [(0, "end"), (143, "end"), (85, "preemption"), (86, "restart"), (137, "restart"), (2, "failure")],
)
def test_every_end_of_a_start_is_told_once(status, event, attempt, hook, capsys):
    one = attempt(("started", {"step": 0}))
    with one.telling_end(one.record_end(status)):
        pass
    assert hook.events() == [event]
    assert (hook.received[0]["job"], hook.received[0]["restart"]) == ("7", 0)
    assert "notify" not in capsys.readouterr().out


RUN = """
run: {name: told, seed: 7}
model: {num_layers: 1, hidden_size: 32, num_heads: 2, attention: performer}
training:
  {steps: 2, seq_len: 64, global_batch_size: 2, micro_batch_size: 1, dtype: float32, log_every: 1, eval_samples: 0}
optimizer: {lr: 1e-3}
schedule: {name: constant, warmup_steps: 0}
data: {train: corpus, num_workers: 0}
logging: {notify: {webhook: RUN_HOOK}}
"""


@pytest.mark.second
def test_a_run_without_slurm_tells_its_end_and_its_failure_once_whatever_the_number_of_ranks(hook, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

    def megakernel(*words, env=environment, launcher=(sys.executable, "-m", "launch.cli")):
        typed = [*launcher, *" ".join(words).split()]
        return subprocess.run(typed, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    prepared = megakernel(
        "prepare --source stdlib --tokenizer byte --out corpus --max-documents 20 --workers 1"
    )
    assert prepared.returncode == 0, prepared.stderr
    unset = {name: value for name, value in environment.items() if name != "RUN_HOOK"}
    refused = megakernel("pretrain run.yaml --nproc 2", env=unset)
    assert refused.stderr.startswith("megakernel: error: logging.notify.webhook=RUN_HOOK is not set")

    assert megakernel("pretrain run.yaml --nproc 2").returncode == 0
    (got,) = hook.received
    assert (got["event"], got["step"], got["steps"], got["reason"]) == ("end", 2, 2, "done")
    hidden = [
        path
        for path in (tmp_path / "runs").rglob("*")
        if path.is_file() and b"t0psecret" in path.read_bytes()
    ]
    assert hidden == []
    wild = "optimizer.lr=1e30 training.steps=9 training.max_skipped_steps=1"
    assert megakernel("pretrain run.yaml --nproc 2 run.name=wild", wild).returncode == 89
    assert hook.events() == ["end", "failure"]
    assert "training.max_skipped_steps=1" in hook.received[1]["reason"]

    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "launch.cli")
    done = megakernel("pretrain run.yaml run.name=other", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert hook.events() == ["end", "failure", "end"]
    assert hook.received[2]["run"] == "other"
