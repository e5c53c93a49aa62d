import pytest

from launch.cli import main


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared corpus: part of the standard library's source files."""
    folder = tmp_path_factory.mktemp("data") / "stdlib"
    command = f"prepare --source stdlib --tokenizer byte --out {folder} --max-documents 60 --validation-fraction 0.1"
    assert main(command.split()) == 0
    return folder
