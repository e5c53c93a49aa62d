import pytest

from megakernel.training.engine import DeferredErrors


class FullDisk:
    """A checkpoint engine whose disk has room for one file."""

    name = "full"

    def __init__(self):
        self.paths: list[str] = []

    def save(self, state_dict, path):
        self.paths.append(path)
        if len(self.paths) > 1:
            raise OSError(28, "No space left on device")


def test_a_failed_write_is_raised_by_raise_first():
    engine = DeferredErrors(FullDisk())
    for path in "abc":
        engine.save({}, path)
    assert engine.paths == ["a", "b"], "nothing is written after the first failure"
    with pytest.raises(OSError, match="No space left"):
        engine.raise_first()


def test_raising_the_error_clears_it():
    engine = DeferredErrors(FullDisk())
    engine.save({}, "a")
    engine.raise_first()
    engine.save({}, "b")
    with pytest.raises(OSError, match="No space left"):
        engine.raise_first()
    engine.raise_first()


def test_other_attributes_are_those_of_the_wrapped_engine():
    assert DeferredErrors(FullDisk()).name == "full"
