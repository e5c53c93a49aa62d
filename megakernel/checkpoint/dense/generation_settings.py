"""How a dense model generates, by the files of its folder."""

import json
from pathlib import Path
from typing import Any

from megakernel.config import UserError

from .checkpoint import CONFIG, json_object

GENERATION_CONFIG = "generation_config.json"

_GENERATED = "_from_model_config"
"""Key of a file that `transformers` generated from config.json, so all that its author chose are token ids."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_settings(folder: Path) -> dict[str, Any]:
    """What generation_config.json sets; of a file that `transformers` generated, and without one, token ids alone.

    Without a file these are the ones of config.json, as in `transformers`. Raises UserError for a damaged file.
    """
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        settings, all_count = json_object(folder / CONFIG), False
    else:
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(settings, dict):
                raise ValueError(f"a {type(settings).__name__}")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is no JSON object ({error}); download it again, or remove it") from None
        all_count = not settings.pop(_GENERATED, False)
        settings.pop("transformers_version", None)
    return {
        key: value
        for key, value in settings.items()
        if value is not None and (all_count or key in _TOKEN_IDS)
    }
