from launch import mechanisms
from megakernel.analysis.catalogue import SOURCES, entry
from megakernel.config import PRESETS


def test_the_page_of_mechanisms_is_what_the_code_says():
    assert mechanisms.PAGE.read_text() == mechanisms.page(), (
        "megakernel mechanisms --markdown > docs/mechanisms.md"
    )


def test_every_preset_has_a_source():
    assert SOURCES.keys() == PRESETS.keys()


def test_costs_grow_as_the_formulas_say():
    assert 3.9 < entry("softmax").growth < 4.1
    # Exactly 2, but for the first block of a row, which has nothing before it.
    assert 1.99 < entry("flurka").growth < 2.01
    assert 1.99 < entry("performer").growth < 2.01
