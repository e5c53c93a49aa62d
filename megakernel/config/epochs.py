"""The length of a run in passes over its corpora, which their manifests turn into steps."""

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from .data import Corpus, Data
from .errors import ConfigError, Problem
from .training import Training
from .validation import validate_section

_KEY = "training.epochs"
_INSTEAD = "set training.tokens or training.steps"
_MOST = 1e6


def with_steps(tree: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The tree with the steps that training.epochs stand for in its place, and what is wrong with it.

    An epoch has as many samples as the corpora have whole ones, and the last step rounds up. Reads the manifests of
    data.train. Where something is wrong, the tree has one step, so that all other keys can be checked.
    """
    training = tree.get("training")
    if not isinstance(training, Mapping):
        return tree, []
    if (tokens := training.get("tokens")) is not None and (_documents(tree.get("model")) or 1) > 1:
        reason = "is turned into steps by one sequence a sample, and those of this model have two"
        return tree, [Problem("training.tokens", tokens, reason, "set training.steps or training.epochs")]
    if training.get("epochs") is None:
        return tree, []
    epochs, problems, steps = training["epochs"], [], 1
    try:
        steps = _steps(tree, {**training, "epochs": None}, epochs)
    except ConfigError as error:
        problems = error.problems
    except ValidationError:  # of another key, which is reported
        pass
    return {**tree, "training": {**training, "epochs": None, "tokens": None, "steps": steps}}, list(problems)


def _steps(tree: Mapping[str, Any], training: Mapping[str, Any], epochs: Any) -> int:
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs <= _MOST:
        raise _problem(epochs, f"is no number of passes from 0 to {_MOST:,.0f}", "give one, such as 3")
    for key in ("steps", "tokens"):
        if (given := training.get(key)) is not None:
            reason = f"is given beside training.{key}={given}, of which one follows from the other"
            raise _problem(epochs, reason, f"remove it, or set {key}: null")
    checked = Training.model_validate({**training, "steps": 1})
    section = tree.get("data")
    data = validate_section(Data, section if isinstance(section, Mapping) else {}, "data")
    others = {
        "training.seq_len_schedule": bool(checked.seq_len_schedule),
        "data.stages": bool(data.stages),
        "weights in data.train": any(corpus.weight is not None for corpus in data.train),
    }
    for name in [name for name, is_given in others.items() if is_given][:1]:
        raise _problem(epochs, f"is one number for all corpora in all steps, and there are {name}", _INSTEAD)
    samples = sum(_samples(corpus, checked.seq_len, tree.get("model"), epochs) for corpus in data.train)
    return max(1, math.ceil(epochs * samples / checked.global_batch_size))


def _samples(corpus: Corpus, seq_len: int, model: Any, epochs: Any) -> int:
    """Samples of one pass over a prepared folder."""
    file = corpus.path / "manifest.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))["splits"]["train"]
        tokens, documents = int(record["tokens"]), int(record["documents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"needs the size of data.train={corpus.path}, and {file} does not tell it ({_first(error)})"
        remedy = f"give a folder of `megakernel prepare`, or {_INSTEAD}"
        raise _problem(epochs, reason, remedy) from None
    of_sample = _documents(model)
    return (tokens - 1) // seq_len if of_sample is None else documents // of_sample


def _documents(model: Any) -> int | None:
    """Documents of a sample, each a sequence of its own; None: samples are packed text. model: not checked yet."""
    kind = model.get("kind") if isinstance(model, Mapping) else None
    if kind == "encoder_decoder":
        return 2  # a text and its translation
    if kind != "classifier":
        return None
    classifier = model.get("classifier")
    found = classifier.get("documents", 1) if isinstance(classifier, Mapping) else 1
    return found if isinstance(found, int) and found > 0 else 1


def _problem(epochs: Any, reason: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(_KEY, epochs, reason, remedy)])


def _first(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0] if text else type(error).__name__
