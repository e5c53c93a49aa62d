"""From a model's folder and prompts to text: what is cheap to check comes before the libraries are loaded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.chat import ChatTemplate, Message
from data_pipeline.tokenizers import Tokenizer
from megakernel.checkpoint.opened import OpenedModel, find
from megakernel.config import Config, UserError

from .engine import Engine, Request, check_positions
from .sampling import Sampling

if TYPE_CHECKING:
    from megakernel.model import LanguageModel

Prompt = str | list[Message]
"""A text to continue, or messages that the model's chat template makes one."""


@dataclass(frozen=True)
class Piece:
    """Text that was added to a sample of a prompt."""

    prompt: int
    """Number of the prompt."""

    sample: int
    """Number of its continuation."""

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
) -> Iterator[Piece]:
    """Continue prompts by a model that is loaded once; yields pieces of text as they come, without the prompts.

    A text ends at a token that ends it (the tokenizer's, the model's own of generation_config.json, `end_tokens`),
    before a stop string, or after max_new_tokens tokens. Prompts are continued together.

    Args:
        folder: folder of the run, or one in the Hugging Face form.
        prompts: texts to continue. An empty one is a new document: the model then continues BOS, or where documents do
            not begin with it the end of the document before.
        max_new_tokens: most tokens to add to each.
        sampling: how tokens are drawn.
        seed: of the draws of each; the same arguments give the same text, whatever other prompts there are.
        samples: continuations of each.
        stop: strings that end a text before them.
        end_tokens: further tokens that end a text, as the tokenizer writes them.
        batch_size: texts that are continued at once.
        step: which checkpoint of a run; None takes the newest good one.

    Raises:
        UserError: no model, no such checkpoint, no tokenizer, a model that is no causal_lm, a prompt that is no text,
            messages without a chat template, or more tokens than the model has positions for.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("samples", samples), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name}={value} adds nothing; give 1 or more")
    if "" in stop:
        raise UserError("stop holds an empty text, which stands everywhere; give at least one character")
    opened = find(folder, step)
    opened.check_continues_text()
    tokens = [prompt_tokens(opened, prompt) for prompt in prompts]
    for one in tokens:
        check_positions(opened.config, len(one), max_new_tokens, "max_new_tokens")
    ends = opened.ends | {_end_token(opened.tokenizer, text) for text in end_tokens}
    model, _ = opened.load()
    engine = Engine(
        model,
        opened.tokenizer,
        isolate_documents=opened.config.data.isolate_documents,
        max_batch=batch_size,
    )
    requests = [
        Request(one, max_new_tokens, sampling, seed, sample, tuple(stop), ends)
        for one in tokens
        for sample in range(samples)
    ]
    return (
        Piece(*divmod(place, samples), step.piece, step.text.finish is not None)
        for place, step in engine.run(requests)
    )


def prompt_tokens(opened: OpenedModel, prompt: Prompt) -> list[int]:
    """Ids of a prompt. Raises UserError for what is no text, and for messages without a template."""
    if isinstance(prompt, str):
        check_text(prompt)
        return opened.tokenizer.prompt(prompt)
    for message in prompt:
        check_text(message["content"])
    if opened.tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer of {opened.folder} has no chat_template, so it knows no messages; give a text to continue, "
            "or a model that was tuned on chats"
        )
    return ChatTemplate(opened.tokenizer).prompt(prompt)


def _end_token(tokenizer: Tokenizer, text: str) -> int:
    if tokenizer.kind == "huggingface":
        found = tokenizer.for_transformers()(text, add_special_tokens=False)["input_ids"]
    else:
        found = tokenizer.encode(text)
    if len(found) != 1:
        raise UserError(
            f"end token {text!r} is {len(found)} tokens of the tokenizer; give one, or a stop string"
        )
    return found[0]


def check_text(prompt: str) -> None:
    """UserError for a prompt that is no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt holds what is no text in UTF-8, at character {error.start + 1}; write it in UTF-8"
        ) from None


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
        tokens, count = tokenizer.prompt(self._prompt), config.logging.sample_tokens
        check_positions(config, len(tokens), count, "logging.sample_tokens")
        ends = frozenset({tokenizer.eod})
        self._request = Request(tokens, count, _SAMPLING, config.run.seed, ends=ends)

    def markdown(self, model: "LanguageModel") -> str:
        """Prompt and continuation; the model is in evaluation mode."""
        engine = Engine(model, self._tokenizer, isolate_documents=self._config.data.isolate_documents)
        text = self._prompt + "".join(step.piece for _, step in engine.run([self._request]))
        # Markdown shows an indented text as it is.
        return "\n".join(f"    {line}" for line in text.splitlines())
