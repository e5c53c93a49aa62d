"""Attention transfer: each layer's new mechanism learns to give what the dense layer's attention gives."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megakernel.attention import WHOLE, AttentionLayer, ContextParallelShard
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.config import Model, UserError
from megakernel.model.layer import attention_cores
from megakernel.ops.dispatch import accum_dtype

from .head_statistics import HeadSums, HeadTag, head_statistics
from .sampled_queries import CapturedInputs, SampledQueries, sample_queries


class AttentionTransfer:
    """Listens to the attention layers of a dense teacher and has the student of each learn from it.

    While it is open (`with transfer:`), whatever runs the teacher without gradients (its layers one after the other, or
    an evaluation by a pipeline's engine) makes each layer hand its queries, keys, values and output to the student of
    that layer. A layer's input is therefore the teacher's, and layers learn apart from each other, those of all
    pipeline stages at once. A layer's gradients are computed on the spot, so that the activations of one layer live at
    a time. For each head of a sequence the loss is

        |y' - y|^2 / |y|^2

    over the sequence's tokens, y (N, D) the teacher's output and y' the student's; its mean over heads and over the
    sequences of the step, summed over layers, does not depend on micro-batches and ranks. With `sampled_queries` the
    weights of sampled queries are measured (`head_statistics`), and with `cross_entropy` learned: so many times the
    cross entropy of the student's weights under the teacher's is added.

    Students that are in evaluation (`eval()`) are measured and learn nothing; those in training are measured as they
    are trained, shut near windows included.
    """

    def __init__(
        self,
        teacher: nn.Module,
        students: Mapping[int, AttentionLayer],
        *,
        sampled_queries: int = 0,
        cross_entropy: float = 0.0,
        seed: int = 0,
    ):
        """teacher: holds the layers of this process, with whatever attention.

        students: layer -> mechanism, such as `converted_cores(student)`. sampled_queries: sampled of each sequence.
        cross_entropy: its weight in the loss. seed: of the sample.

        Raises:
            UserError: a student that cannot be called as the teacher's layer is.
            ValueError: cross_entropy without sampled_queries.
        """
        if cross_entropy and not sampled_queries:
            raise ValueError(
                f"cross_entropy={cross_entropy} is of sampled queries; set sampled_queries, such as 16"
            )
        self._teachers = attention_cores(teacher)
        check_students(self._teachers, students)
        self._students = dict(students)
        self._sampled_queries, self._cross_entropy, self._seed = sampled_queries, cross_entropy, seed
        self._step, self._batch_rows = 0, 1
        self._found: list[_Found] = []
        self._hooks: list[Any] = []
        self.sums = HeadSums()
        """`error`, `cross_entropy` and what `head_statistics` measures, since the last `sums.clear()`."""

    def begin(self, step: int, batch_rows: int) -> None:
        """What follows belongs to `step`, whose global batch has so many sequences; seeds the sample of queries."""
        self._step, self._batch_rows = step, batch_rows

    def __enter__(self) -> "AttentionTransfer":
        for index in self._students:
            hook = partial(self._hear, index)
            self._hooks.append(self._teachers[index].register_forward_hook(hook))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def loss(self) -> Tensor:
        """The loss of what was captured since the last call, of this process's share of sequences, tokens, heads and
        layers.

        Its `backward()` hands gradients that are known already to the students' parameters; over data and context ranks
        they are to be added up.
        """
        found, self._found = self._found, []
        device = next((one.loss.device for one in found), torch.device("cpu"))
        total = torch.zeros((), device=device)
        for one in found:
            total = total + _Known.apply(one.loss, one.gradients, *one.parameters)
        return total

    def _hear(self, index: int, core: AttentionLayer, args: tuple, output: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("the teacher of attention transfer runs under torch.no_grad()")
        student = self._students[index]
        parameters = [x for x in student.parameters() if x.requires_grad] if student.training else []
        inputs = CapturedInputs.of(*args)
        with torch.set_grad_enabled(bool(parameters)):
            loss = self._loss_of(index, student, inputs, output.detach())
        gradients: Sequence[Tensor] = ()
        if parameters:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        self._found.append(_Found(loss.detach(), parameters, gradients))

    def _loss_of(self, index: int, student: AttentionLayer, inputs: CapturedInputs, output: Tensor) -> Tensor:
        """This shard's and these heads' part of the loss; notes down what it is made of."""
        place = partial(HeadTag, layer=index, head=student.query_heads.start)
        # Sequences are whole on every shard, and count once.
        rows = torch.full((), float(len(inputs.q) if inputs.cp_shard.rank == 0 else 0), device=output.device)
        errors = normalized_errors(inputs.run(student), output, inputs.cp_shard)
        self.sums.add(place("error"), errors.detach().sum(0), rows)
        loss = errors.sum()
        if self._sampled_queries:
            loss = loss + self._look_at_queries(self._teachers[index], student, inputs, place)
        return loss / (self._batch_rows * len(student.query_heads) * student.heads.size)

    def _look_at_queries(
        self,
        teacher: AttentionLayer,
        student: AttentionLayer,
        inputs: CapturedInputs,
        place: "partial[HeadTag]",
    ) -> Tensor:
        """The part of the loss that sampled queries have, before it is a mean; notes down what they see."""
        queries = sample_queries(inputs.length, self._sampled_queries, self._seed, self._step)
        rows = SampledQueries.of(inputs, queries, student.causal)
        scores = rows.scores()
        if isinstance(teacher, SoftmaxAttention) and teacher.softcap is None:
            teacher_weights = rows.softmax(scores, teacher.window)
        else:
            teacher_weights = rows.weights(teacher.forward)  # past the hooks, which would capture the call
        student_weights = rows.weights(student)
        values, slopes = cross_entropy(teacher_weights, student_weights, rows.real)
        if inputs.cp_shard.rank == 0:  # all shards have the same
            count = torch.full((), float(len(values)), device=values.device)
            self.sums.add(place("cross_entropy"), values.sum(0), count)
            for name, (sums, counts) in head_statistics(
                rows, student_weights, teacher_weights, scores, student.near_window
            ).items():
                self.sums.add(place(name), sums, counts)
        if not self._cross_entropy:
            return values.new_zeros(())
        value = values.sum() if inputs.cp_shard.rank == 0 else values.new_zeros(())
        if torch.is_grad_enabled():
            slope = rows.weighted(student, slopes)
            value = value + slope - slope.detach()
        return self._cross_entropy * value


class _Found(NamedTuple):
    """A layer's part of the loss, and its gradients."""

    loss: Tensor
    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor]


class _Known(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad.to(known.dtype) * known for known in ctx.gradients)


def check_students(teachers: Mapping[int, AttentionLayer], students: Mapping[int, AttentionLayer]) -> None:
    """Raise UserError unless each student can be called as the teacher of its layer is."""
    for index, student in students.items():
        teacher = teachers.get(index)
        reason = "is a layer that the teacher does not have" if teacher is None else _unlike(teacher, student)
        if reason:
            raise UserError(f"attention transfer: layer {index} {reason}")


def _unlike(teacher: AttentionLayer, student: AttentionLayer) -> str | None:
    if student.compresses_input:
        return "makes keys of its compressed input, not of the teacher's keys; set compression.compress: projected"
    if student.keys_per_head != 1:
        keys = student.keys_per_head
        return f"wants {keys} keys at a position, and the teacher has one; take mixture.kind: shifted"
    for name in ("causal", "head_dim", "query_heads", "kv_heads"):
        own, wanted = getattr(student, name), getattr(teacher, name)
        if own != wanted:
            return (
                f"has {name}={own} where the teacher has {wanted}; give both models the same sizes and layout"
            )
    return None


def check_parts_around(student: Model, dense: Model, transfers: bool) -> None:
    """Raise UserError for a layer without what the dense model's has around its attention.

    transfers: also for one that has more. An attention transfer trains mechanisms alone, and the dense model's output
    is not what a mechanism behind a new convolution should give.
    """
    for index, (mine, theirs) in enumerate(zip(student.attentions, dense.attentions)):
        at = f"model.attention: layer {index} has"
        for part, wanted in theirs.around.items():
            if (found := mine.around.get(part)) != wanted:
                raise UserError(
                    f"{at} {part}={json.dumps(found)} and the dense model {json.dumps(wanted)}; set what the dense "
                    "model has"
                )
        if transfers and (more := mine.around.keys() - theirs.around.keys()):
            raise UserError(
                f"{at} {min(more)}, which the dense model has not and an attention transfer does not train; remove it, "
                "or train all of the layer (uptrain.transfer: null; objective.kind: distill)"
            )


FLOOR = 1e-8
"""Of weights in a cross entropy, so that one that vanishes has a finite gradient."""


def normalized_errors(output: Tensor, target: Tensor, cp_shard: ContextParallelShard = WHOLE) -> Tensor:
    """|y' - y|^2 / |y|^2 of each sequence and head, (B, H), of outputs y' and targets y (B, H, n, D), 0 at padding.

    Of a shard of the sequences it is the shard's part: those of all shards add up. Float32 or better.
    """
    dtype = accum_dtype(target.dtype)
    output, target = output.to(dtype), target.to(dtype)
    energy = cp_shard.total(target.square().sum((2, 3)))
    return (output - target).square().sum((2, 3)) / energy.clamp(min=torch.finfo(dtype).tiny)


def cross_entropy(teacher: Tensor, student: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """-sum_j p_ij log w_ij of weights p and w (B, H, R, N), mean over the queries (B, R) that are `real`.

    Returns it, (B, H), and its derivatives by w, (B, H, R, N). Below FLOOR the logarithm goes on as a line.
    """
    count = real.sum(-1).clamp(min=1)[:, None]
    kept = student.clamp(min=FLOOR)
    log = kept.log() + (student - kept) / FLOOR
    return -(teacher * log).sum((2, 3)) / count, -teacher / kept / count[..., None, None]
