"""Texts that a model writes while it is trained."""

from data_pipeline.tokenizers import Tokenizer
from megakernel.config import Config
from megakernel.generation import Sampling, check_positions, continued
from megakernel.model import LanguageModel

_SAMPLING = Sampling(temperature=0.8)


class Samples:
    """Continues logging.sample_prompt with a model that this process holds as a whole.

    The draws have one seed, so that two samples differ by what was learned between them.
    Raises UserError for more tokens than the model has positions for.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer):
        assert config.logging.sample_prompt is not None
        self._config = config
        self._tokenizer = tokenizer
        self._prompt = config.logging.sample_prompt
        self._tokens = tokenizer.prompt(self._prompt)
        check_positions(config, len(self._tokens), config.logging.sample_tokens, "logging.sample_tokens")

    def markdown(self, model: LanguageModel) -> str:
        """Prompt and continuation; the model is in evaluation mode."""
        shards = continued(
            model,
            self._tokenizer,
            self._tokens,
            max_new_tokens=self._config.logging.sample_tokens,
            sampling=_SAMPLING,
            seed=self._config.run.seed,
            isolate_documents=self._config.data.isolate_documents,
        )
        text = self._prompt + "".join(shards)
        # Markdown shows an indented text as it is.
        return "\n".join(f"    {line}" for line in text.splitlines())
