"""A real TensorBoard, queried over HTTP like a browser, shows everything that docs/monitoring.md documents."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megakernel.generation import Sampling, generate_texts
from megakernel.training.observing.metrics_writer import HPARAM_METRICS, LAYOUT
from tests.distributed.processes import run_ranks
from tests.distributed.training_run import metrics, pretrain_on_fake_gpu, train, write_config

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"
ATTENTION = "{preset: flurka, near: {kind: softmax, join: gated}, compression: {block_size: 16, rank: 4}}"
CHOOSES = "{preset: selected, near: {block_size: 16}, selection: {blocks: 2}}"
OPTIONS = (
    "training.steps=2",
    "training.eval_every=1",
    "model.num_layers=2",
    f"model.attention_pattern=[{ATTENTION}]",
    "logging.peak_tflops=1",
)
LOGGING = (
    "logging.histograms_every=1",
    "logging.analysis_every=2",
    "logging.sample_prompt='def '",
    "logging.sample_tokens=20",
)
PLUGINS = {"SCALARS": "scalars", "HISTOGRAMS": "histograms", "IMAGES": "images", "TEXT": "text"}


def documented_tags():
    """(tag as a regular expression, page of TensorBoard) for each row of the table of tags."""
    rows = re.findall(r"^\| `([^`]+)` \| (SCALARS|HISTOGRAMS|IMAGES|TEXT) \|", PAGE.read_text(), re.MULTILINE)
    # A corpus is named by its folder.
    patterns = [(re.escape(tag).replace("CORPUS", "[^ ]+"), page) for tag, page in rows]
    return [(re.sub(r"[A-Z]+", r"[\\w.]+", pattern), page) for pattern, page in patterns]


class TensorBoard:
    def __init__(self, address):
        self._data = f"{address}data/plugin"
        self._opener = build_opener(ProxyHandler({}))

    def get(self, place, **query):
        return self._opener.open(f"{self._data}/{place}?{urlencode(query)}").read()

    def json(self, place, **query):
        return json.loads(self.get(place, **query))

    def post(self, place, body):
        request = Request(
            f"{self._data}/{place}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.load(self._opener.open(request))

    def tags(self, run, page):
        tags = self.json(f"{PLUGINS[page]}/tags").get(run, {})
        return set(tags)

    def points(self, run, page, tag):
        """(step, value) pairs of a tag."""
        plugin = PLUGINS[page]
        points = self.json(f"{plugin}/{plugin}", run=run, tag=tag)
        if page == "IMAGES":
            return [
                (one["step"], self._opener.open(f"{self._data}/images/individualImage?{one['query']}").read())
                for one in points
            ]
        if page == "TEXT":
            return [(one["step"], one["text"]) for one in points]
        return [(step, value) for _, step, value in points]


@pytest.fixture(scope="module")
def root(tmp_path_factory, corpus):
    config = write_config(tmp_path_factory.mktemp("runs"), corpus)
    # One layer chooses blocks, which has plots of its own.
    chooses = f"model.attention_pattern=[{ATTENTION}, {CHOOSES}]"
    first = (*OPTIONS, *LOGGING, chooses, "run.name=first")
    assert run_ranks(pretrain_on_fake_gpu, 1, config, first, str(tmp_path_factory.mktemp("driver"))) == [0]
    second = shutil.copytree(corpus, config.parent.with_name("second") / "corpus-2")
    blend = (f"data.train=[{corpus},{second}]", "training.eval_sources=true", "training.z_loss=1e-4")
    # A save that training waits for is complete when the next step is logged.
    saves = ("checkpoint.every=1", "checkpoint.async_save=false")
    train(config, 2, *OPTIONS, *blend, *saves, "run.name=pieces", "parallel.context=2")
    return config.parent


@pytest.fixture(scope="module")
def tensorboard(root):
    """A client of the server that `megakernel monitor` starts."""
    command = [sys.executable, "-m", "launch.cli", "monitor", "--root", str(root), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        address = re.fullmatch(r"TensorBoard: (http://\S+/)\n", line)
        assert address, line
        browser = TensorBoard(address[1])
        deadline = time.monotonic() + 60
        while any("train/loss" not in browser.tags(run, "SCALARS") for run in ("first", "pieces")):
            assert time.monotonic() < deadline, "TensorBoard shows no train/loss"
            time.sleep(0.2)
        yield browser
    finally:
        server.terminate()
        server.communicate()


@pytest.mark.second
def test_tensorboard_shows_exactly_the_documented_tags(tensorboard):
    runs = ("first", "pieces")
    rows = documented_tags()
    assert {page for _, page in rows} == set(PLUGINS)
    for page in PLUGINS:
        patterns = [tag for tag, its in rows if its == page]
        tags = {run: tensorboard.tags(run, page) for run in runs}
        undocumented = {tag for run in runs for tag in tags[run]} - {
            tag for run in runs for tag in tags[run] if any(re.fullmatch(p, tag) for p in patterns)
        }
        assert not undocumented, page
        for pattern in patterns:
            run, tag = next(
                ((run, tag) for run in runs for tag in sorted(tags[run]) if re.fullmatch(pattern, tag)),
                (None, None),
            )
            assert run is not None, f"{pattern} is documented but not written"
            assert tensorboard.points(run, page, tag), tag


def test_scalars_equal_those_of_metrics_jsonl(tensorboard, root):
    shown = tensorboard.points("first", "SCALARS", "train/loss")
    logged = [(line["step"], line["train/loss"]) for line in metrics(root / "first") if "train/loss" in line]
    assert dict(shown) == pytest.approx(dict(logged), rel=1e-6)  # float32


def test_histograms_count_every_value_of_every_step(tensorboard):
    tag = "weights/tied_modules.embedding.tokens.weight"
    points = tensorboard.points("first", "HISTOGRAMS", tag)
    assert [step for step, _ in points] == [1, 2]
    assert all(sum(count for _, _, count in buckets) == 384 * 64 for _, buckets in points)


def test_text_samples_are_what_the_checkpoint_generates(tensorboard, root):
    shown = dict(tensorboard.points("first", "TEXT", "samples/text_summary"))
    assert set(shown) == {0, 1, 2}
    assert "<code>def " in shown[2]
    written = "".join(
        piece.text
        for piece in generate_texts(
            root / "first", ["def "], max_new_tokens=20, sampling=Sampling(0.8), seed=7
        )
    )
    # Read from the event file: TensorBoard's pages drop what HTML does not allow, such as control characters.
    sample = EventAccumulator(str(root / "first")).Reload().Tensors("samples/text_summary")[-1]
    [text] = sample.tensor_proto.string_val
    assert text.decode().splitlines() == [f"    {line}" for line in f"def {written}".splitlines()]


def test_the_hparams_page_has_the_last_values_of_every_run(tensorboard, root):
    experiment = tensorboard.post("hparams/experiment", {"experimentName": ""})
    assert {info["name"]["tag"] for info in experiment["metricInfos"]} == set(HPARAM_METRICS)
    query = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
        "colParams": [{"metric": {"group": "", "tag": tag}} for tag in HPARAM_METRICS],
        "startIndex": 0,
        "sliceSize": 10,
    }
    groups = tensorboard.post("hparams/session_groups", query)["sessionGroups"]
    by_run = {group["sessions"][0]["name"]: group for group in groups}
    assert set(by_run) == {"first", "pieces"}
    for name, group in by_run.items():
        assert group["sessions"][0]["status"] == "STATUS_SUCCESS"
        values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
        last = {tag: value for line in metrics(root / name.split("/")[0]) for tag, value in line.items()}
        assert values["eval/loss"] == pytest.approx(last["eval/loss"], rel=1e-6)
        assert values["throughput/mfu"] == pytest.approx(last["throughput/mfu"], rel=1e-6)
    assert by_run["pieces"]["hparams"]["parallel.context"] == 2


def test_every_chart_of_the_custom_scalars_page_shows_data(tensorboard):
    layout = tensorboard.json("custom_scalars/layout")
    assert [page["title"] for page in layout["category"]] == list(LAYOUT)
    for page in layout["category"]:
        for chart in page["chart"]:
            for tag in chart["multiline"]["tag"]:
                shown = tensorboard.json("custom_scalars/scalars", run="first", tag=tag)
                assert any(shown["tag_to_events"].values()), f"{chart['title']}: {tag}"


def test_megakernel_monitor_lists_both_runs(root):
    command = [sys.executable, "-m", "launch.cli", "monitor", "--root", str(root), "--once"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"}
    )
    rows = [line.split()[:3] for line in done.stdout.splitlines()[1:]]
    assert rows == [["first", "DONE", "2/2"], ["pieces", "DONE", "2/2"]]
