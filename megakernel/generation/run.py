"""Continuing prompts with a model's folder; cheap checks come before heavy libraries are imported."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.chat import ChatTemplate, Message
from data_pipeline.tokenizers import Tokenizer
from megakernel.checkpoint.opened import OpenedModel, find_model
from megakernel.config import Config, UserError

from .engine import GenerationEngine, TextRequest, check_positions
from .sampling import Sampling

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

Prompt = str | list[Message]
"""A text to continue, or messages to render with the model's chat template."""


@dataclass(frozen=True)
class TextPiece:
    """New text of one continuation of a prompt."""

    prompt: int
    """Index of the prompt."""

    sample: int
    """Index of its continuation."""

    text: str
    """May be empty."""

    is_last: bool


def generate_texts(
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    samples: int = 1,
    stop: Sequence[str] = (),
    end_tokens: Sequence[str] = (),
    batch_size: int = 32,
    step: int | None = None,
) -> Iterator[TextPiece]:
    """Continue prompts in batches with a model that is loaded once; yields new text as it is generated.

    A text ends at an end token (the tokenizer's, those of generation_config.json, `end_tokens`), before a stop string,
    or after max_new_tokens tokens.

    Args:
        folder: a run folder, or one in Hugging Face format.
        prompts: texts to continue. An empty one starts a document: the model continues BOS, or end-of-document if
            documents do not begin with BOS.
        max_new_tokens: maximum number of new tokens per text.
        sampling: how tokens are drawn.
        seed: seed of each text's draws; the same arguments give the same text, whatever the other prompts.
        samples: continuations per prompt.
        stop: strings before which a text ends.
        end_tokens: further end tokens, as text.
        batch_size: texts in progress at once.
        step: step of a run's checkpoint; None takes the newest good one.

    Raises:
        UserError: for no model, checkpoint or tokenizer, a model that is not a causal_lm, a prompt that is not valid
            UTF-8, messages without a chat template, or more tokens than learned positions.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("samples", samples), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name}={value} adds nothing; give 1 or more")
    if "" in stop:
        raise UserError("stop holds an empty text, which matches everywhere; give at least one character")
    opened = find_model(folder, step)
    opened.check_continues_text()
    tokens = [prompt_tokens(opened, prompt) for prompt in prompts]
    for ids in tokens:
        check_positions(opened.config, len(ids), max_new_tokens, "max_new_tokens")
    ends = opened.ends | {_end_token(opened.tokenizer, text) for text in end_tokens}
    model, _ = opened.load()
    isolate = opened.config.data.isolate_documents
    engine = GenerationEngine(model, opened.tokenizer, isolate_documents=isolate, max_batch=batch_size)
    requests = [
        TextRequest(ids, max_new_tokens, sampling, seed, sample, tuple(stop), ends)
        for ids in tokens
        for sample in range(samples)
    ]
    return (
        TextPiece(*divmod(index, samples), step.piece, step.text.finish is not None)
        for index, step in engine.run(requests)
    )


def continue_texts(
    opened: OpenedModel,
    model: "LanguageModel",
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[str],
    sampling: Mapping[str, Any],
) -> Iterator[tuple[int, str]]:
    """Continue prompts, given as ids, with a loaded model; yields (index, continuation) as each ends.

    sampling: options of `Sampling`. stop: strings before which a text ends.
    """
    isolate = opened.config.data.isolate_documents
    engine = GenerationEngine(model, opened.tokenizer, isolate_documents=isolate)
    settings, ends, texts = Sampling(**sampling), opened.ends, [""] * len(prompts)
    requests = [
        TextRequest(ids, max_new_tokens, settings, sample=index, stop=tuple(stop), ends=ends)
        for index, ids in enumerate(prompts)
    ]
    for index, step in engine.run(requests):
        texts[index] += step.piece
        if step.text.finish is not None:
            yield index, texts[index]


def prompt_tokens(opened: OpenedModel, prompt: Prompt) -> list[int]:
    """Ids of a prompt. Raises UserError for invalid UTF-8, and for messages without a chat template."""
    if isinstance(prompt, str):
        check_text(prompt)
        return opened.tokenizer.prompt(prompt)
    for message in prompt:
        check_text(message["content"])
    if opened.tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer of {opened.folder} has no chat_template, so it cannot render messages; give a text to "
            "continue, or a model that was tuned on chats"
        )
    return ChatTemplate(opened.tokenizer).prompt(prompt)


def _end_token(tokenizer: Tokenizer, text: str) -> int:
    if tokenizer.kind == "huggingface":
        ids = tokenizer.for_transformers()(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise UserError(
            f"end token {text!r} is {len(ids)} tokens of the tokenizer; give one, or a stop string"
        )
    return ids[0]


def check_text(prompt: str) -> None:
    """UserError for a prompt that is not valid UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt is not valid UTF-8 at character {error.start + 1}; write it in UTF-8"
        ) from None


_SAMPLING = Sampling(temperature=0.8)


class Samples:
    """Continues logging.sample_prompt during training, with an unpartitioned model.

    The draws have a fixed seed, so that samples differ only by what was learned between them.
    Raises UserError for more tokens than learned positions.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer):
        assert config.logging.sample_prompt is not None
        self._isolate = config.data.isolate_documents
        self._tokenizer = tokenizer
        self._prompt = config.logging.sample_prompt
        tokens, count = tokenizer.prompt(self._prompt), config.logging.sample_tokens
        check_positions(config, len(tokens), count, "logging.sample_tokens")
        ends = frozenset({tokenizer.eod})
        self._request = TextRequest(tokens, count, _SAMPLING, config.run.seed, ends=ends)

    def markdown(self, model: "LanguageModel") -> str:
        """Prompt and continuation as Markdown; the model is in evaluation mode."""
        engine = GenerationEngine(model, self._tokenizer, isolate_documents=self._isolate)
        text = self._prompt + "".join(step.piece for _, step in engine.run([self._request]))
        # Markdown renders indented text verbatim.
        return "\n".join(f"    {line}" for line in text.splitlines())
