"""From a run folder and a prompt to text: what is cheap to check comes before the libraries are loaded."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data_pipeline import tokenizers
from data_pipeline.tokenizers import Tokenizer
from megakernel.checkpoint.trained_run import TrainedRun, tokenizer_folder
from megakernel.config import Config, UserError
from megakernel.parallel.device import choose_device

from .decoding import Decoder, Sampling, TextStream

if TYPE_CHECKING:
    from megakernel.model import LanguageModel


def generate_texts(
    folder: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    step: int | None = None,
) -> Iterator[Iterator[str]]:
    """Continue prompts by a model that is loaded once; yields the text of each as it comes, without the prompt.

    A text ends where the model ends the document, or after max_new_tokens tokens. Each is to be read to its end before
    the next.

    Args:
        folder: folder of the run.
        prompts: texts to continue. An empty one is a new document: the model then continues BOS, or where documents do
            not begin with it the end of the document before.
        max_new_tokens: most tokens to add to each.
        sampling: how tokens are drawn.
        seed: of the draws of each; the same arguments give the same text.
        step: which checkpoint; None takes the newest good one.

    Raises:
        UserError: no run, no such checkpoint, no tokenizer, a model that is no causal_lm, a prompt that is no text,
            or more tokens than it has positions for.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} adds nothing; give 1 or more")
    run = TrainedRun.find(folder, step)
    if not run.config.model.is_causal:
        raise UserError(
            f"model.kind={run.config.model.kind} of {folder} continues no text; give a run of a causal_lm"
        )
    tokenizer = tokenizers.load(tokenizer_folder(folder), add_bos=run.config.data.add_bos)
    tokens = []
    for prompt in prompts:
        _check_text(prompt)
        tokens.append(tokenizer.prompt(prompt))
        check_positions(run.config, len(tokens[-1]), max_new_tokens, "max_new_tokens")
    from megakernel.checkpoint.one_process import one_process_model

    device = choose_device("cpu" if run.config.training.device == "cpu" else "auto")
    model = one_process_model(run, tokenizer.vocab_size, device)
    return (
        continued(
            model,
            tokenizer,
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            isolate_documents=run.config.data.isolate_documents,
        )
        for prompt in tokens
    )


def _check_text(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"prompt holds what is no text in UTF-8, at character {error.start + 1}; write it in UTF-8"
        ) from None


def continued(
    model: "LanguageModel",
    tokenizer: Tokenizer,
    prompt: list[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    isolate_documents: bool,
) -> Iterator[str]:
    """The text behind `prompt`, one token or more, of a model in evaluation mode that this process holds as a whole.

    It ends where the model ends the document, or after max_new_tokens tokens.
    """
    text = TextStream(tokenizer, prompt)
    decoder = Decoder(model, tokenizer.eod, isolate_documents and not tokenizer.ends_messages)
    draws = torch.Generator().manual_seed(seed)
    unread = prompt
    for _ in range(max_new_tokens):
        logits = decoder.read(unread)
        # A model may have more words than its tokenizer: special ones, or those that a dense model came with.
        token = sampling.draw(logits[: tokenizer.vocab_size], draws)
        if token == tokenizer.eod:
            break
        yield text.add(token)
        unread = [token]
    yield text.end()


def check_positions(config: Config, prompt: int, new: int, key: str) -> None:
    """UserError, naming `key`, where `new` tokens behind a prompt are more than the model has positions for."""
    rows = config.model.max_positions or config.training.seq_len
    if config.model.position == "learned" and prompt + new > rows + 1:
        raise UserError(
            f"{key}={new} after a prompt of {prompt} tokens exceeds the model's {rows} learned positions; "
            f"give at most {max(rows + 1 - prompt, 0)}, or a shorter prompt"
        )


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

    def markdown(self, model: "LanguageModel") -> str:
        """Prompt and continuation; the model is in evaluation mode."""
        continuation = continued(
            model,
            self._tokenizer,
            self._tokens,
            max_new_tokens=self._config.logging.sample_tokens,
            sampling=_SAMPLING,
            seed=self._config.run.seed,
            isolate_documents=self._config.data.isolate_documents,
        )
        text = self._prompt + "".join(continuation)
        # Markdown shows an indented text as it is.
        return "\n".join(f"    {line}" for line in text.splitlines())
