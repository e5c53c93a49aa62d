"""What a column of a study's table shows: a registry of measures by name."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from megakernel.config import Model, UserError
from megakernel.config.mechanisms import LayerShape
from megakernel.config.section import Section

if TYPE_CHECKING:
    from .runs import StudyResult

Value = float | int | str | bool | None | tuple[float, ...]
"""What a measure finds; None: an empty cell."""


class Measure(Section):
    """A column."""

    measure: str = ""
    """Its name in MEASURES."""

    format: str = ""
    """How Python formats each number: `.4f`."""

    bold: bool = False

    optional: bool = False
    """Whether rows may lack it."""

    separator: str = " → "
    """Between several numbers of one cell."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """The value in one row; results: those of all rows."""
        raise NotImplementedError

    def text(self, value: Value) -> str:
        """A value as the text of a cell."""
        if value is None:
            return ""
        if isinstance(value, tuple):
            text = self.separator.join(format(part, self.format) for part in value)
        elif isinstance(value, str | bool):
            text = {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else value
        else:
            text = format(value, self.format)
        return f"**{text}**" if self.bold else text

    def mean(self, values: Sequence[Value]) -> str:
        """The mean over seeds and the sample standard deviation; other values are listed, equal ones once."""
        numbers = [value for value in values if isinstance(value, float)]
        if len(numbers) < len(values) or len(values) == 1:
            return ", ".join(dict.fromkeys(map(self.text, values)))
        mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
        return f"{format(mean, self.format)} ± {format(deviation, self.format.replace('+', ''))}"


class Plain(Measure):
    """A measure without further keys; see `PLAIN`."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        return PLAIN[self.measure][0](result)

    def text(self, value: Value) -> str:
        """The value, by default in the format of `PLAIN`."""
        return super(Plain, self._formatted).text(value)

    def mean(self, values: Sequence[Value]) -> str:
        """The mean over seeds in the same format."""
        return super(Plain, self._formatted).mean(values)

    @property
    def _formatted(self) -> "Plain":
        return self.model_copy(update={"format": self.format or PLAIN[self.measure][1]})


class Runs(Measure):
    """The number of runs that a row averages."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        return 1

    def mean(self, values: Sequence[Value]) -> str:
        """The number of values."""
        return str(len(values))


class Setting(Measure):
    """A key of the run's configuration."""

    key: str
    """Such as model.kind."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        found: Value = attrgetter(self.key)(result.config)
        return found


def state_size(model: Model, length: int) -> int:
    """Size of the decoding state after `length` tokens, in numbers, over all layers."""
    shape = LayerShape(model.num_heads, model.kv_heads, model.head_size)
    sizes = [layer.state_sizes(shape) for layer in model.attentions]
    return sum(constant + added * length for constant, added in sizes)


class OfTask(Measure):
    """A measure of the result of one of the study's tasks."""

    of: str
    """Name of the task."""


class TaskNumber(OfTask):
    """A number in the result of a task."""

    value_of: str | list[str]
    """Its key, such as loss or scores.matthews; of several, the cell has all."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        if not result.evaluations:
            return None
        keys = [self.value_of] if isinstance(self.value_of, str) else self.value_of
        found = [self._at(result.evaluations[self.of], key) for key in keys]
        return found[0] if len(found) == 1 else tuple(found)

    def _at(self, tree: Mapping[str, Any], dotted: str) -> Any:
        value: Any = tree
        for key in dotted.split("."):
            if value is None or key not in value:
                if self.optional:
                    return None
                known = ", ".join(value or ())
                raise UserError(
                    f"value_of={dotted} is not in the result of {self.of}, which has {known}; correct it"
                )
            value = value[key]
        return value


def _same_run_of(model: str, result: "StudyResult", results: Sequence["StudyResult"]) -> "StudyResult | None":
    """The result of another model with the variant and seed of `result`; None if it is not there."""
    same = (model, result.run.variant, result.run.seed)
    return next((other for other in results if other.key == same), None)


class Against(TaskNumber):
    """A number in the result of a task, less that of another model with the same variant and seed."""

    value_of: str
    """Its key, such as loss."""

    baseline: str
    """Name of the other model."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        other = _same_run_of(self.baseline, result, results)
        if other is None or other is result or not result.evaluations:
            return None
        numbers = (self._at(one.evaluations[self.of], self.value_of) for one in (result, other))
        mine, theirs = map(float, numbers)
        return mine - theirs


class Buckets(OfTask):
    """Mean over the tokens of a task's buckets of positions."""

    value_of: Literal["loss", "gain"] = "loss"
    """A bucket's number."""

    start: int = 0
    """First position of the first bucket that counts."""

    end: int | None = None
    """Buckets count that begin before this position."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        if not result.evaluations:
            return None
        evaluation = result.evaluations[self.of]
        buckets = [
            bucket
            for bucket in evaluation.get("by_position") or evaluation["buckets"]
            if self.start <= bucket["first"] and (self.end is None or bucket["first"] < self.end)
        ]
        tokens: int = sum(bucket["tokens"] for bucket in buckets)
        if not tokens:
            return None
        return float(sum(bucket[self.value_of] * bucket["tokens"] for bucket in buckets)) / tokens


class Metric(Measure):
    """A metric of the training, from metrics.jsonl."""

    tag: str
    """Such as eval/loss."""

    pick: Literal["first", "last", "median", "largest", "all"] = "last"
    """Which of its values; all: every one of them in the cell."""

    mean_of: int = 1
    """Of so many first or last values, the mean."""

    skip: int = 0
    """First values that do not count."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        values = list(result.curve(self.tag).values())[self.skip :]
        if not values:
            return None
        if self.pick == "all":
            return tuple(values)
        if self.pick == "median":
            return statistics.median(values)
        if self.pick == "largest":
            return max(values)
        return statistics.fmean(values[: self.mean_of] if self.pick == "first" else values[-self.mean_of :])


class FirstStep(Measure):
    """The first step at which a metric reaches a level, or never."""

    tag: str
    """Such as eval/accuracy."""

    level: float
    """The least value."""

    format: str = ","

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        curve = sorted(result.curve(self.tag).items())
        return next((step for step, value in curve if value >= self.level), "never")


class FlopsToLoss(Measure):
    """TFLOPs of training until a loss first reaches that of another model at its end, or never.

    Counted by their formulas at training.seq_len; both models have the same variant and seed.
    """

    baseline: str
    """Name of the other model."""

    tag: str = "eval/loss"
    """The loss."""

    format: str = ",.3f"

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        other = _same_run_of(self.baseline, result, results)
        if other is None or not (curve := other.curve(self.tag)):
            return None
        level = curve[max(curve)]
        steps = sorted(result.curve(self.tag).items())
        step = next((step for step, loss in steps if loss <= level), None)
        if step is None:
            return "never"
        return result.costs[2] * result.config.training.consumed(step)[1] / 1e12


class PerToken(Measure):
    """Cost of a token of a sequence: the median µs of a step after the first, or bytes of all processes."""

    unit: Literal["µs", "bytes"]
    beyond: str = ""
    """bytes: the model whose memory stands for libraries and weights."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        tokens = result.config.training.seq_len
        if self.unit == "µs":
            times = list(result.curve("throughput/step_time").values())
            return statistics.median(times[1:] or times) / tokens * 1e6
        base = next((other for other in results if other.name == self.beyond), None)
        if base is None or base is result:
            return None
        return (_memory(result) - _memory(base)) * 2**30 / tokens


class ReportNumber(Measure):
    """A number of an up-training's report; shares are of the perplexity lost by swapping that is recovered."""

    value_of: Literal["loss", "perplexity", "beyond", "tokens", "swapped", "recovered", "of_trained_on"]
    """beyond: the loss beyond the window; swapped: the loss before the first step; recovered: the share relative to the
    dense model; of_trained_on: relative to the dense model trained on as many tokens."""

    def value(self, result: "StudyResult", results: Sequence["StudyResult"]) -> Value:
        """See the class."""
        # Takes seconds, and few studies need it.
        from megakernel.model.vocabulary_loss import perplexity
        from megakernel.uptraining.report import recovered

        entry, report = result.entry, result.report
        swapped: float = report["swapped"]["loss"]
        is_untrained = entry["name"] in (report["dense"]["name"], report["swapped"]["name"])
        if self.value_of in ("loss", "beyond", "tokens"):
            number: float = entry[self.value_of]
            return number
        if self.value_of == "perplexity":
            return perplexity(entry["loss"])
        if is_untrained:
            return None
        if self.value_of == "swapped":
            return swapped
        if self.value_of == "recovered":
            return recovered(swapped, entry["loss"], report["dense"]["loss"])
        ends = [other.report["trained_on"] for other in results if other.report]
        end = next((end["loss"] for end in ends if end is not None), None)
        return None if end is None else recovered(swapped, entry["loss"], end)


def _variant(result: "StudyResult") -> Value:
    name = result.run.variant
    return f"{int(name):,}" if name.isdecimal() else name or None


def _memory(result: "StudyResult") -> float:
    return max(result.curve("memory/peak_gib").values()) * result.nproc


PLAIN: dict[str, tuple[Callable[["StudyResult"], Value], str]] = {
    "name": (lambda result: result.name if result.report else f"`{result.name}`", ""),
    "variant": (_variant, ""),
    "seed": (lambda result: result.run.seed, ""),
    # The step of the measured checkpoint.
    "step": (lambda result: result.step, ","),
    # Numbers in the decoding state after training.seq_len tokens.
    "state_size": (lambda result: state_size(result.config.model, result.config.training.seq_len), ","),
    # Of the whole model, and MFLOPs per token of forward passes and of training, counted by their formulas.
    "parameters": (lambda result: result.costs[0], ","),
    "forward_mflops": (lambda result: result.costs[1] / 1e6, ".3f"),
    "training_mflops": (lambda result: result.costs[2] / 1e6, ".3f"),
    # GiB of all processes: the largest peak of one, times their number.
    "memory": (_memory, ".2f"),
}
"""Name of a measure without further keys -> its function and its usual format."""

MEASURES: dict[str, type[Measure]] = {
    **dict.fromkeys(PLAIN, Plain),
    "runs": Runs,
    "setting": Setting,
    "task": TaskNumber,
    "against": Against,
    "buckets": Buckets,
    "metric": Metric,
    "first_step": FirstStep,
    "flops_to_loss": FlopsToLoss,
    "per_token": PerToken,
    "report": ReportNumber,
}
"""Name of a measure in a study's file -> class."""
