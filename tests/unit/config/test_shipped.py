from pathlib import Path

import pytest

from data_pipeline.sources import library_functions
from megakernel.config import data_parallel_size, load
from megakernel.model.parameters import parameter_count

from . import trees

CONFIGS = Path(__file__).parents[3] / "configs"
PROCESSES = {
    "demo": 2,
    "demo-masked": 2,
    "demo-classifier": 2,
    "demo-translation": 1,
    "pretrain-125m": 8,
    "pretrain-350m": 8,
    "pretrain-1b": 16,
    "pretrain-7b": 64,
    "pretrain-125m-hybrid": 8,
    "pretrain-350m-hybrid": 8,
    "pretrain-1b-hybrid": 16,
    "pretrain-7b-hybrid": 64,
    "pretrain-350m-selected": 8,
    "million_token_cpu": 2,
    "long-context-350m": 8,
    "long-context-350m-hybrid": 8,
    "long-context-350m-selected": 8,
}
SIZES = {"125m": 125e6, "350m": 350e6, "1b": 1e9, "7b": 7e9}
GPT2_TOKENS = 50_257


def test_every_run_file_is_listed_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(PROCESSES)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_run_file_is_valid_for_its_number_of_processes(name):
    config = load(CONFIGS / f"{name}.yaml")
    assert config.run.name == name
    assert data_parallel_size(config, PROCESSES[name]) >= 1


def test_the_long_context_run_grows_to_a_million_tokens():
    training = load(CONFIGS / "long-context-350m.yaml").training
    assert [phase.training.seq_len for phase in training.phases] == [8192, 65_536, 2**20]
    assert training.consumed(training.steps)[1] == pytest.approx(12e9, rel=0.05)


def test_the_demo_encoders_have_the_sizes_of_the_demo():
    names = ("demo", "demo-masked", "demo-classifier")
    demo, masked, classifier = (load(CONFIGS / f"{name}.yaml").model for name in names)
    assert (demo.kind, masked.kind, classifier.kind) == ("causal_lm", "masked_lm", "classifier")
    other = {"kind": demo.kind, "attention": demo.attention, "classifier": None}
    assert demo == masked.model_copy(update=other) == classifier.model_copy(update=other)


def test_the_demo_classifier_has_one_class_per_package():
    classifier = load(CONFIGS / "demo-classifier.yaml").model.classifier
    assert classifier is not None
    assert classifier.num_classes == len(set(library_functions()["package"]))


# Files in cluster/ are no part of a run; tests/unit/config/test_cluster.py tests them.
FRAGMENTS = [path for path in sorted(CONFIGS.glob("*/*.yaml")) if path.parent.name != "cluster"]


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_fragment_completes_a_run_file(path, tmp_path):
    base = trees.file(tmp_path, "base.yaml", training={"steps": 9000}, init={"from": "models/dense"})
    run = tmp_path / "run.yaml"
    run.write_text(f"extends: [{base}, {path}]\nrun: {{name: mine}}\n")
    assert load(run).run.name == "mine"


def test_the_hybrid_long_context_run_grows_to_64_thousand_tokens():
    training = load(CONFIGS / "long-context-350m-hybrid.yaml").training
    assert [phase.training.seq_len for phase in training.phases] == [8192, 65_536]
    assert training.consumed(training.steps)[1] == pytest.approx(15e9, rel=0.05)


@pytest.mark.parametrize("size", SIZES)
def test_a_hybrid_has_softmax_in_every_fourth_layer_and_differs_in_attention_alone(size):
    hybrid, plain = (load(CONFIGS / f"pretrain-{size}{kind}.yaml") for kind in ("-hybrid", ""))
    windows = [layer.window for layer in hybrid.model.attentions]
    assert windows == [128, 128, 128, None] * (plain.model.num_layers // 4)
    attention = {"attention": plain.model.attention, "attention_pattern": None}
    assert hybrid.model.model_copy(update=attention) == plain.model
    assert hybrid.training == plain.training
    assert hybrid.parallel == plain.parallel


def test_the_models_that_choose_blocks_differ_in_attention_alone():
    for name in ("pretrain-350m", "long-context-350m"):
        chooses, plain = (load(CONFIGS / f"{name}{kind}.yaml") for kind in ("-selected", ""))
        layers = [layer.selection is not None for layer in chooses.model.attentions]
        assert layers == [False, False, False, True] * (plain.model.num_layers // 4)
        attention = {"attention": plain.model.attention, "attention_pattern": None}
        assert chooses.model.model_copy(update=attention) == plain.model
        assert chooses.training == plain.training


@pytest.mark.parametrize("size", SIZES)
def test_a_model_has_the_size_of_its_name_and_a_softmax_twin(size, tmp_path):
    models = []
    for name in (size, f"{size}-softmax"):
        run = tmp_path / f"{name}.yaml"
        run.write_text(f"extends: [{trees.file(tmp_path, 'base.yaml')}, {CONFIGS / 'model' / name}.yaml]")
        models.append(load(run).model)
    flurka, softmax = models
    # Names are rounded: 350m (GPT-3 Medium) has 361 million parameters with SwiGLU's wider MLP.
    assert parameter_count(flurka, GPT2_TOKENS, seq_len=8192) == pytest.approx(SIZES[size], rel=0.05)
    assert softmax.attention.is_plain_softmax
    assert flurka.model_copy(update={"attention": softmax.attention}) == softmax


# (steps, batch size, learning rate, warmup, layers, hidden size, heads, head size, FFN size); None: not in the paper.
PUBLISHED = {
    # FLuRKA, section 4.2 and table 6.
    "glue/flurka/pretrain": (120_000, 1024, 1.2e-4, None, 12, 768, 12, 64, 3072),
    # Learning the Transformer Kernel, tables 6 and 8; LRA's learning rate is rate / sqrt(warmup) at its peak.
    "lra/kl/listops": (10_000, 32, 5e-3 / 1000**0.5, 1000, 6, 512, 8, 64, 2048),
    "lra/kl/text": (20_000, 32, 5e-2 / 8000**0.5, 8000, 4, 256, 4, 64, 1024),
    "lra/kl/retrieval": (5000, 32, 5e-2 / 8000**0.5, 8000, 4, 128, 4, 32, 512),
    "lra/kl/image": (200 * 175, 256, 5e-4, 175, 1, 128, 8, 8, 128),
    "glue/kl/pretrain": (None, 64, 5e-4, 10_000, 3, 300, 10, 64, 512),
    "glue/kl/rte": (2490 * 10 // 64, 64, 1e-4, 2490 // 64, 3, 300, 10, 64, 512),
    # Skyformer, section 5.
    "lra/skyformer/listops": (50_000, 32, 1e-4, None, 2, 64, 2, 32, 128),
    "lra/skyformer/text": (50_000, 16, 1e-4, None, 2, 64, 2, 32, 128),
    "lra/skyformer/retrieval": (50_000, 16, 2e-4, None, 2, 64, 2, 32, 128),
    "lra/skyformer/image": (50_000, 256, 1e-4, None, 2, 64, 2, 32, 128),
    "lra/skyformer/pathfinder": (50_000, 128, 2e-4, None, 2, 64, 2, 32, 128),
    # FLuRKA, table 6; steps and width from Skyformer, whose training it takes over.
    "lra/flurka/listops": (50_000, 32, 1e-4, None, 2, 64, 2, 64, 128),
    "lra/flurka/text": (50_000, 32, 1e-4, None, 2, 64, 2, 64, 128),
    "lra/flurka/retrieval": (50_000, 16, 2e-4, None, 2, 64, 2, 64, 128),
    "lra/flurka/image": (50_000, 256, 1e-4, None, 2, 64, 2, 64, 128),
    "lra/flurka/pathfinder": (50_000, 128, 2e-4, None, 2, 64, 2, 64, 128),
    # Transformer-MGK, appendix A.1.1, steps and rates of the file that it names; A.1.2.
    "lra/mgk/listops": (5000, 32, 1e-4, 1000, 2, 64, None, 32, 128),
    "lra/mgk/text": (20_000, 32, 1e-4, 8000, 2, 64, None, 32, 128),
    "lra/mgk/retrieval": (30_000, 32, 1e-4, 800, 2, 64, None, 32, 128),
    "wikitext/mgk/small-8": (500_000, 96, 2.5e-4, 2000, 16, 128, 8, 16, 2048),
    "wikitext/mgk/small-4": (500_000, 96, 2.5e-4, 2000, 16, 128, 4, 16, 2048),
    "wikitext/mgk/medium-8": (None, 96, 2.5e-4, 2000, 16, 256, 8, 32, 2048),
    "wikitext/mgk/medium-4": (None, 96, 2.5e-4, 2000, 16, 256, 4, 32, 2048),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_of_a_paper_has_the_papers_numbers(name):
    config = load(CONFIGS / f"{name}.yaml")
    training, model = config.training, config.model
    actual = (training.steps, training.global_batch_size, config.optimizer.lr, config.schedule.warmup_steps)
    actual += (model.num_layers, model.hidden_size, model.num_heads, model.head_size, model.ffn_size)
    published = [
        value if value is not None else own for value, own in zip(PUBLISHED[name], actual, strict=True)
    ]
    assert list(actual) == pytest.approx(published, rel=1e-3)


def test_a_language_model_of_a_paper_reads_its_segments_for_its_epochs():
    for name, length in (("small-8", 256), ("small-4", 256), ("medium-8", 384), ("medium-4", 384)):
        config = load(CONFIGS / "wikitext" / "mgk" / f"{name}.yaml")
        training = config.training
        assert training.seq_len == length
        # Transformer-MGK, A.1.2: 120 epochs of 103 million words, dropout of 10 %.
        assert training.consumed(training.steps)[1] / 103e6 == pytest.approx(120, rel=0.01)
        assert (config.model.dropout.residual, config.model.dropout.embedding) == (0.1, 0.1)
