import re

from launch.configuration_page import PAGE, page
from megakernel.config import Config
from megakernel.config.validation import all_keys


def test_the_page_is_up_to_date():
    remedy = "run `python -m launch.configuration_page`"
    assert PAGE.read_text(encoding="utf-8") == page(), remedy


def test_every_key_has_a_row_with_its_meaning():
    meanings = dict(re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", page(), re.MULTILINE))
    sections = set(Config.model_fields)
    keys = {dotted.rpartition(".")[2] for dotted in all_keys(Config)} - sections
    assert keys <= meanings.keys()
