"""Writing and reading tables, plotting them, and adding plots to TensorBoard once."""

from importlib import import_module

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megakernel.analysis.plots import drawing
from megakernel.analysis.plots.catalogue import ANALYSES, select_analyses
from megakernel.analysis.plots.run import add_to_tensorboard
from megakernel.analysis.plots.table import Plot, summaries, to_csv
from megakernel.config import Config, UserError
from tests.csv_tables import from_csv

ROWS = [
    {"layer": layer, "head": head, "name": "a,b", "value": 0.5 * layer + head, "gap": "" if head else 1e-9}
    for layer in range(2)
    for head in range(2)
]


def test_rows_round_trip_through_csv():
    assert from_csv(to_csv(ROWS)) == ROWS


def test_summaries_group_rows():
    assert summaries(ROWS, "value", ["layer"]) == [((0,), 0.0, 0.5, 1.0), ((1,), 0.5, 1.0, 1.5)]
    assert summaries(ROWS, "gap", []) == [((), 1e-9, pytest.approx(1e-9), 1e-9)]


def test_lines_average_rows_with_the_same_x():
    figure = drawing.lines(ROWS, "head", "value", panel="name")
    [axes] = figure.axes
    [line] = axes.get_lines()
    assert line.get_xydata().tolist() == [[0.0, 0.25], [1.0, 1.25]]
    assert axes.get_title() == "a,b"


def test_cells_are_placed_by_their_row():
    figure = drawing.cells(ROWS[:3], "head", "layer", "value")
    grid = figure.axes[0].get_images()[0].get_array()
    assert grid.filled(-1.0).tolist() == [[0.0, 1.0], [0.5, -1.0]]


def test_distributions_count_every_row():
    axes = drawing.distributions(ROWS, "value", "layer").axes[0]
    assert len(axes.patches) == 2


def config(attention, **model):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention": attention, **model}
    data = {"train": "data/x", "isolate_documents": "kind" not in model}
    tree = {"run": {"name": "x"}, "model": sizes, "data": data}
    tree["training"] = {"steps": 1, "seq_len": 64, "global_batch_size": 1, "dtype": "float32"}
    return Config.model_validate(tree)


FOR_EVERY_MODEL = {"attention", "singular_values", "ranks", "span", "instability", "key_weights", "keys"}


@pytest.mark.parametrize(
    ("attention", "more"),
    [
        ("softmax", {"spectral_error", "statistical_dimension", "flurka_error", "query_likelihood"}),
        ("flurka", {"spectral_error", "statistical_dimension", "flurka_error", "gates", "claims"}),
        ("linformer_causal", {"spectral_error", "statistical_dimension", "flurka_error"}),
        ("selected", {"spectral_error", "statistical_dimension", "flurka_error", "choices"}),
        (
            "gmm_prf",
            {
                "spectral_error",
                "statistical_dimension",
                "flurka_error",
                "covariances",
                "kernel_deviation",
                "voting",
                "gradients",
            },
        ),
        ("fastfood_rks", {"spectral_error", "statistical_dimension", "flurka_error"}),
        ("mgk", {"mixing", "query_likelihood", "mixture_costs"}),
        ("smlk", {"mixing", "mixture_costs", "spectral_error", "statistical_dimension", "flurka_error"}),
    ],
)
def test_all_selects_the_analyses_that_apply_to_the_mechanism(attention, more):
    names = {analysis.name for analysis in select_analyses(["all"], config(attention), "runs/x")}
    assert names == FOR_EVERY_MODEL | more


@pytest.mark.parametrize(
    ("attention", "names"),
    [("linformer", {"key_weights"}), ("reformer", set()), ("bigbird", {"key_weights", "keys"})],
)
def test_keys_are_drawn_where_tokens_have_keys_of_their_own(attention, names):
    """Linformer's keys are of landmarks, and Reformer's are its queries."""
    encoder = config(attention, kind="masked_lm")
    found = {analysis.name for analysis in select_analyses(["all"], encoder, "runs/x")}
    assert found & {"key_weights", "keys"} == names


def test_an_analysis_applies_if_one_layer_of_a_pattern_has_the_mechanism():
    mixed = config("softmax", attention_pattern=["softmax", "gmm_rks"])
    assert [analysis.name for analysis in select_analyses(["covariances", "ranks", "ranks"], mixed, "x")] == [
        "ranks",
        "covariances",
    ]


@pytest.mark.parametrize(
    ("name", "explanation"),
    [
        ("gates", "--what gates: no layer of runs/x has a gate between a near window and landmarks"),
        ("covariances", "no layer of runs/x has a learned Gaussian mixture"),
        ("spectra", "--what spectra is no analysis; choose all, attention, singular_values, ranks"),
    ],
)
def test_an_analysis_that_does_not_apply_is_refused_with_those_that_do(name, explanation):
    with pytest.raises(UserError) as error:
        select_analyses(["ranks", name], config("softmax"), "runs/x")
    assert explanation in str(error.value)
    assert "query_likelihood" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_vote_over_classes_is_left_out_for_a_regression_and_refused_by_name():
    def of_classes(number: int) -> Config:
        return config("gmm_rks", kind="classifier", classifier={"num_classes": number})

    two, one = (
        {analysis.name for analysis in select_analyses(["all"], of_classes(number), "x")} for number in (2, 1)
    )
    assert two - one == {"voting"}
    with pytest.raises(
        UserError, match=r"^--what voting: runs/x predicts numbers, not classes; choose attention"
    ):
        select_analyses(["voting"], of_classes(1), "runs/x")


def test_every_analysis_has_its_function():
    for name, analysis in ANALYSES.items():
        module = import_module(f"megakernel.{analysis.function.rpartition('.')[0]}")
        assert getattr(module, f"measure_{name}").__doc__


def test_a_plot_can_be_split_by_value_and_omits_empty_columns():
    plots = [
        Plot("cells", "", "head", "name", "value", each="layer"),
        Plot("lines", "gap", "head", "gap", first="head"),
    ]
    assert list(drawing.figures(ROWS, plots)) == ["layer_0", "layer_1", "gap"]
    assert list(drawing.figures([ROWS[1], ROWS[3]], plots)) == ["layer_0", "layer_1"]


def test_tensorboard_has_a_plot_once_per_step(tmp_path):
    plot = tmp_path / "span.png"
    drawing.cells(ROWS, "head", "layer", "value").savefig(plot, dpi=50)
    events = tmp_path / "analysis"
    for step in (5, 5, 7):
        add_to_tensorboard(events, {"analysis/span/span": plot}, step, "span")
    add_to_tensorboard(events, {"analysis/ranks/rank": plot, "analysis/ranks/stable_rank": plot}, 5, "ranks")
    reader = EventAccumulator(str(events), size_guidance={"images": 0})
    reader.Reload()
    assert sorted(reader.Tags()["images"]) == [
        "analysis/ranks/rank",
        "analysis/ranks/stable_rank",
        "analysis/span/span",
    ]
    images = reader.Images("analysis/span/span")
    assert [image.step for image in images] == [5, 7]
    assert images[0].encoded_image_string == plot.read_bytes()
    assert (images[0].width, images[0].height) == (4.5 * 50, drawing.HEIGHT * 50)
    assert len(list(events.iterdir())) == 3


def test_colors_can_be_the_same_for_all_checkpoints_and_plots_have_titles():
    rows = [{"x": x, "y": 0, "value": value} for x, value in enumerate((0.2, 0.4))]
    figure = drawing.figures(rows, [Plot("cells", "beyond_16", "x", "y", "value", scale=(0, 1))])["beyond_16"]
    image = figure.axes[0].get_images()[0]
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    assert figure.get_suptitle() == "beyond 16"


def test_colors_can_be_logarithmic():
    rows = [{"x": x, "y": 0, "value": value} for x, value in enumerate((1.0, 1e-9, -1.0))]
    image = drawing.cells(rows, "x", "y", "value", decades=2).axes[0].get_images()[0]
    assert (image.norm.vmin, image.norm.vmax) == (0.01, 1.0)
    assert image.norm(image.get_array()).filled(-1.0).tolist()[0][:2] == [1.0, 0.0]
