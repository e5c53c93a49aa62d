"""generation_config.json of an exported model: what its dense model's says, and what its tokenizer tells."""

import json
from pathlib import Path
from typing import Any

from data_pipeline.tokenizers import Tokenizer
from megakernel.config import Config, ConfigError, UserError

from .dense import is_dense_checkpoint
from .trained_run import recorded_config

FILE = "generation_config.json"

_MADE = "_from_model_config"
"""Marks a file that `transformers` made of config.json: nobody chose what it says."""


def generation_config(config: Config, tokenizer: Tokenizer, words: int) -> dict[str, Any]:
    """Its keys, for the model of a run.

    Those of the dense model that the run began with, directly or through other runs, as long as they are still there;
    of any other model greedy decoding, the default of `transformers`. A document's end always ends a text. Words of the
    model that its tokenizer does not know are never chosen.

    words: how many the model has.
    """
    own = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.eod}
    settings = {key: value for key, value in own.items() if value is not None} | _given(config.init.source)
    ends = settings["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eod not in ends:
        settings["eos_token_id"] = [*ends, tokenizer.eod]
    unknown = range(tokenizer.vocab_size, words)
    if unknown:
        settings["suppress_tokens"] = sorted({*settings.get("suppress_tokens", ()), *unknown})
    return settings


def _given(source: Path | None) -> dict[str, Any]:
    """What the user chose for the dense model where a chain of `init.from` begins."""
    passed: set[Path] = set()
    while source is not None and not is_dense_checkpoint(source):
        folder = source.resolve()
        run = folder.parents[1] if folder.parent.name == "checkpoints" else folder
        file = run / "config.yaml"
        if file in passed or not file.is_file():
            return {}
        passed.add(file)
        try:
            source = recorded_config(run).init.source
        except ConfigError:  # of a version that knew other keys
            return {}
    if source is None or not (source / FILE).is_file():
        return {}
    try:
        given = json.loads((source / FILE).read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError(f"a {type(given).__name__}")
    except ValueError as error:
        raise UserError(
            f"{source / FILE} is no JSON object ({error}); download it again, or remove it"
        ) from None
    if given.pop(_MADE, False):
        return {}
    return {key: value for key, value in given.items() if value is not None and key != "transformers_version"}
