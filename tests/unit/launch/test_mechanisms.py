import re

import pytest

from launch import mechanisms
from megakernel.analysis.catalogue import PAPERS, SOURCES, catalogue, entry
from megakernel.config import PRESETS, Attention, expand_preset, yaml_text


def test_the_mechanism_page_is_up_to_date():
    assert mechanisms.PAGE.read_text() == mechanisms.page(catalogue()), (
        "megakernel dev mechanisms --markdown > docs/mechanisms.md"
    )


def test_every_preset_has_a_source():
    assert SOURCES.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_mechanisms_of_the_four_papers_name_their_equation(preset):
    source = SOURCES[preset]
    assert (source.equation is not None) == (source.paper in PAPERS)


SNIPPETS = re.findall(
    r"^### (\w+)\n\n```yaml\n(.*?)```", mechanisms.PAGE.read_text(), re.DOTALL | re.MULTILINE
)


def test_every_preset_has_a_snippet():
    assert [name for name, _ in SNIPPETS] == list(PRESETS)


@pytest.mark.parametrize(("preset", "snippet"), SNIPPETS, ids=[name for name, _ in SNIPPETS])
def test_a_snippet_loads_to_its_preset(preset, snippet):
    tree = expand_preset(preset)
    settings = {tree["mechanism"]: tree.get(tree["mechanism"], {})} if "mechanism" in tree else {}
    written = yaml_text.parse(snippet, "mechanisms.md")["model"]["attention"]
    assert Attention.model_validate(written) == Attention.model_validate({**tree, **settings})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_mechanism_supports_context_parallelism_in_its_models(preset):
    assert all(layer.spec.exchanged(layer.causal) for layer in entry(preset).layers.values())


def test_costs_grow_with_length_as_in_the_formulas():
    assert 3.9 < entry("softmax").growth < 4.1
    # Exactly 2 except for the first block of a sequence, which has no earlier tokens.
    assert 1.99 < entry("flurka").growth < 2.01
    assert 1.99 < entry("performer").growth < 2.01
