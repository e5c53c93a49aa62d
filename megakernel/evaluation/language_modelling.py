"""`--task lm`: the loss by position, in sliding windows, with a shuffled far context, or on repeated spans."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from data_pipeline.corpus import Corpora
from data_pipeline.verification import user_cache
from megakernel.config import Config, Data, UserError
from megakernel.config.errors import existing_parent
from megakernel.config.section import Section

from .result import Evaluation, PositionBucket
from .subject import LoadedRun, OnPass, OpenedRun, TaskResult, check_positions, sequences_per_pass

if TYPE_CHECKING:
    from data_pipeline.loader import ValidationBatches
    from data_pipeline.samples import BlendedSamples

    from .sliding import SlidingBatches

LEAST_REPEATED = 64
"""Minimum sequence length for `repeated`, whose spans are half a sequence."""


class Options(Section):
    """Options of `lm:`."""

    samples: int | None = None
    """Validation samples, or windows; null takes --samples, else training.eval_samples. One pass at most."""

    seq_len: int | None = None
    """Tokens per sample; null takes --seq-len, else training.eval_seq_len, else training.seq_len."""

    draws: int | None = None
    """Draws of the layers' noise over which probabilities are averaged; null takes --draws, else the current noise."""

    stride: int | None = Field(default=None, ge=1)
    """Overlapping windows: each ends `stride` tokens after the previous one and scores only the new tokens."""

    far: Literal["shuffled"] | None = None
    """shuffled: also the loss with tokens of other documents in place of the far context."""

    repeated: Literal["text", "random"] | None = None
    """The loss of spans of half a sequence that occur twice in a row: held-out text, or random ids."""

    split: str = "validation"
    """Split of the validation corpora, such as test."""

    near: int | None = Field(default=None, ge=1)
    """far: true tokens before each bucket of positions; null takes an eighth of seq_len."""


@dataclass(frozen=True)
class LanguageModelling:
    """The task with its options."""

    spec: str
    options: Options

    @property
    def split(self) -> str | None:
        """The split whose loss it measures; None for random ids."""
        return None if self.options.repeated == "random" else self.options.split

    def check(self, source: OpenedRun) -> None:
        """UserError for options that contradict the run or each other."""
        options = self.options
        config = evaluated_config(source.config, options.samples, options.seq_len)
        if options.draws is not None:
            _check_draws(options.draws, source)
        if problem := next(self._problems(source, config), None):
            raise UserError(f"--task {self.spec}: {problem}")
        if options.stride is None and self.split is not None:
            check_length(config, source.text, self.split, repeats=1 if options.repeated is None else 2)

    def _problems(self, source: OpenedRun, config: Config) -> Iterator[str]:
        options, seq_len = self.options, config.training.seq_len
        keys = ("far", "repeated", "stride", "draws")
        set_options = {key: value for key in keys if (value := getattr(options, key)) is not None}
        for key in [key for key in set_options if key != "draws"]:
            if options.split != "validation":
                yield f"{key}={set_options[key]} reads the validation split; leave out this option or split="
            if not config.model.is_causal:
                kind = config.model.kind
                yield f"{key}={set_options[key]} needs a causal_lm, {source.folder} is of kind {kind}; leave it out"
        if options.near is not None and options.far is None:
            yield f"near={options.near} has no effect alone; add far=shuffled"
        if len(set_options) > 1 and set_options.keys() & {"far", "repeated"}:
            (key, value), (other, other_value), *_ = set_options.items()
            yield f"{key}={value} cannot be combined with {other}={other_value}; leave out one of them"
        if options.repeated is not None and seq_len < LEAST_REPEATED:
            yield (
                f"half of {seq_len} tokens is too short to be repeated; give a seq_len of at least {LEAST_REPEATED}"
            )
        if options.far is not None and self._near(seq_len) >= seq_len // 2:
            yield (
                f"near={self._near(seq_len)} leaves no far context in sequences of {seq_len} tokens; give at most "
                f"{max(seq_len // 2 - 1, 1)}, or a larger seq_len"
            )
        if options.stride is not None and options.stride > seq_len:
            yield (
                f"stride={options.stride} would leave tokens out between windows of {seq_len}; give at most {seq_len}"
            )

    def _near(self, seq_len: int) -> int:
        return self.options.near if self.options.near is not None else max(1, seq_len // 8)

    def measure(self, subject: LoadedRun, progress: OnPass) -> TaskResult:
        """An `Evaluation`, with far a `FarContext`, with repeated `RepeatedSpans`."""
        config = evaluated_config(subject.config, self.options.samples, self.options.seq_len)
        if self.options.far is not None:
            return self._measure_far(subject, config, progress)
        if self.options.repeated is not None:
            return self._measure_repeated(subject, config, progress)
        return self._measure_loss(subject, config, progress)

    def _batches(self, subject: LoadedRun, config: Config) -> "ValidationBatches | SlidingBatches":
        from data_pipeline.loader import ValidationBatches
        from data_pipeline.order import Share
        from data_pipeline.pairs import check_no_pairs

        from .sliding import SlidingBatches

        corpora, training = subject.text, config.training
        split, stride = self.options.split, self.options.stride
        if stride is None:
            return ValidationBatches(config, corpora, Share(), split)
        counts = (training.seq_len, stride, training.eval_samples, training.micro_batch_size)
        answers = config.data.scored == "answers"
        parts = corpora.of_split(split)
        check_no_pairs(parts, config.data.key_of(split))
        return SlidingBatches(parts, *counts, corpora.eod, answers)

    def _measure_loss(self, subject: LoadedRun, config: Config, progress: OnPass) -> Evaluation:
        from data_pipeline.loader import ValidationBatches

        from .classification import predict_examples
        from .perplexity import loss_by_position

        options, corpora, batches = self.options, subject.text, self._batches(subject, config)
        by_position: list[PositionBucket] = []
        accuracy, scores, vote = None, None, None
        if config.model.classifier is not None:
            assert isinstance(batches, ValidationBatches)
            found = predict_examples(subject.model, batches, subject.device, progress, options.draws)
            tokens, loss, accuracy = len(found.labels), found.loss, found.accuracy
            scores, vote = found.scores, found.vote
        else:
            by_position = loss_by_position(subject.model, batches, subject.device, progress, options.draws)
            tokens = sum(bucket.tokens for bucket in by_position)
            if not tokens:
                raise UserError(
                    f"--task {self.spec}: no token of the {batches.samples} samples counts in the loss; "
                    "give more samples"
                )
            loss = sum(bucket.loss * bucket.tokens for bucket in by_position) / tokens
        # If only answers count, the loss is not a code length of text.
        is_text = config.model.is_causal and corpora.is_text(options.split)
        return Evaluation(
            run=str(subject.folder),
            step=subject.step,
            samples=batches.samples,
            seq_len=config.training.seq_len,
            tokens=tokens,
            loss=loss,
            bits_per_byte=corpora.bits_per_byte(loss, options.split) if is_text else None,
            accuracy=accuracy,
            by_position=by_position,
            draws=options.draws,
            stride=options.stride,
            split=options.split,
            scores=scores,
            vote=vote,
        )

    def _measure_far(self, subject: LoadedRun, config: Config, progress: OnPass) -> TaskResult:
        from .far_context import FarContext, measure_far

        training = config.training
        samples, count = _samples(subject, config, training.seq_len)
        near = self._near(training.seq_len)
        buckets = measure_far(subject, samples, count, training.micro_batch_size, near, progress)
        checkpoint = (str(subject.folder), subject.step)
        return FarContext(self.spec, *checkpoint, count, training.seq_len, near, buckets)

    def _measure_repeated(self, subject: LoadedRun, config: Config, progress: OnPass) -> TaskResult:
        from .repeated_spans import RepeatedSpans, measure_repeated, random_spans

        training = config.training
        span, count = training.seq_len // 2, training.eval_samples
        if self.options.repeated == "random":
            spans = random_spans(count, span, subject.tokenizer.vocab_size)
        else:
            samples, count = _samples(subject, config, span)
            spans = torch.stack([samples[index][:span] for index in range(count)])
        found = measure_repeated(subject, spans, training.micro_batch_size, progress)
        return RepeatedSpans(self.spec, str(subject.folder), subject.step, count, span, *found)


def _samples(subject: LoadedRun, config: Config, length: int) -> tuple["BlendedSamples", int]:
    """The validation stream in samples of `length` tokens, and the number of samples to measure."""
    from data_pipeline.samples import BlendedSamples, index_cache

    corpora, keys = subject.text.of_split("validation"), (config.data.key_of("validation"), "seq_len")
    cache, answers = index_cache(config.data), config.data.scored == "answers"
    periodic = config.data.blend == "periodic"
    samples = BlendedSamples(corpora, "validation", length, 0, cache, keys, answers, periodic)
    count = min(config.training.eval_samples, samples.per_epoch)
    samples.build(count)
    return samples, count


def evaluated_config(config: Config, samples: int | None, seq_len: int | None) -> Config:
    """The run's configuration with other evaluation samples and length.

    Raises UserError for no samples, no tokens, or sequences beyond learned positions.
    """
    training = config.training
    samples = training.eval_samples if samples is None else samples
    seq_len = training.evaluation_len if seq_len is None else seq_len
    if samples < 1:
        raise UserError(f"samples={samples} leaves nothing to evaluate; give --samples 1 or more")
    if seq_len < 1:
        raise UserError(f"seq_len={seq_len} leaves nothing to predict; give --seq-len 1 or more")
    check_positions(config, seq_len, "seq_len")
    changes = {
        "eval_samples": samples,
        "seq_len": seq_len,
        "eval_seq_len": seq_len,
        "seq_len_schedule": [],
        "micro_batch_size": sequences_per_pass(config, seq_len),
    }
    data = _with_writable_index(config.data)
    return config.model_copy(update={"training": training.model_copy(update=changes), "data": data})


def _with_writable_index(data: Data) -> Data:
    """The section with its sample indices in the user's cache if their folder is read-only, as in others' corpora."""
    from data_pipeline.samples import index_cache

    if os.access(existing_parent(index_cache(data).absolute()), os.W_OK):
        return data
    try:
        return data.model_copy(update={"index_cache": user_cache() / "indices"})
    except RuntimeError:  # a user without a home; perhaps the folder holds the indices
        return data


def check_length(config: Config, corpora: Corpora, split: str = "validation", repeats: int = 1) -> None:
    """UserError if a corpus's split has fewer tokens than one sample, which holds its text `repeats` times."""
    if config.model.kind in (
        "classifier",
        "encoder_decoder",
    ):  # documents are truncated or padded to any length
        return
    for corpus in corpora.of_split(split):
        tokens, seq_len = corpus.record(split).tokens, config.training.seq_len
        if tokens <= seq_len // repeats:
            raise UserError(
                f"seq_len={seq_len}: {corpus} has only {tokens} {split} tokens; give at most "
                f"{repeats * tokens - 1}"
            )


def _check_draws(draws: int, source: OpenedRun) -> None:
    if draws < 1:
        raise UserError(f"draws={draws} leaves nothing to average; give --draws 1 or more")
    if not any(layer.redraws for layer in source.config.model.mechanisms):
        raise UserError(
            f"draws={draws}: no layer of {source.folder} has noise that training redraws, so all draws would be the "
            "same; leave out --draws"
        )
