"""Attention transfer: each layer's new mechanism learns to reproduce the output of the dense layer's attention."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megakernel.attention import WHOLE_SEQUENCE, AttentionLayer, ContextParallelShard
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.config import Model, UserError
from megakernel.model.layer import attention_cores
from megakernel.ops.tensors import accum_dtype

from .head_statistics import HeadSums, HeadTag, head_statistics
from .sampled_queries import CapturedInputs, SampledQueries, sample_queries


class AttentionTransfer:
    """Captures inputs and outputs of a dense teacher's attention layers, and trains a student of each on them.

    Within `with transfer:`, any forward pass of the teacher without gradients runs each layer's student on the queries,
    keys and values of that layer. Students' inputs are therefore the teacher's, and layers are trained independently,
    those of all pipeline stages at once. A layer's gradients are computed immediately, so that the activations of only
    one layer are alive at a time. For each head of a sequence the loss is

        |y' - y|^2 / |y|^2

    over the sequence's tokens, with the teacher's output y (N, D) and the student's y'. Its mean over heads and over
    the sequences of the step, summed over layers, does not depend on micro-batches and ranks. With `sampled_queries`
    the weights of sampled queries are measured (`head_statistics`), and with `cross_entropy` also trained: it is the
    factor of the cross entropy of the student's weights relative to the teacher's, which is added to the loss.

    Students in evaluation mode are only measured; those in training mode are measured as they are trained, that is with
    near_dropout.
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
        """teacher: has the layers of this process, with any attention.

        students: layer -> mechanism, such as `converted_cores(student)`. sampled_queries: their number per sequence.
        cross_entropy: its weight in the loss. seed: seed of the samples.

        Raises:
            UserError: a student cannot be called with the arguments of its teacher's layer.
            ValueError: cross_entropy without sampled_queries.
        """
        if cross_entropy and not sampled_queries:
            raise ValueError(
                f"cross_entropy={cross_entropy} needs sampled queries; set sampled_queries, such as 16"
            )
        self._teachers = attention_cores(teacher)
        check_students(self._teachers, students)
        self._students = dict(students)
        self._sampled_queries, self._cross_entropy, self._seed = sampled_queries, cross_entropy, seed
        self._step, self._batch_rows = 0, 1
        self._losses: list[_LayerLoss] = []
        self._hooks: list[Any] = []
        self.sums = HeadSums()
        """`error`, `cross_entropy` and the results of `head_statistics` since the last `sums.clear()`."""

    def begin(self, step: int, batch_rows: int) -> None:
        """Begin a step, which seeds the sample of queries. batch_rows: sequences of its global batch."""
        self._step, self._batch_rows = step, batch_rows

    def __enter__(self) -> "AttentionTransfer":
        for index in self._students:
            hook = partial(self._train_student, index)
            self._hooks.append(self._teachers[index].register_forward_hook(hook))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def loss(self) -> Tensor:
        """The loss of everything captured since the last call: this process's sequences, tokens, heads and layers.

        Its `backward()` adds the precomputed gradients to the students' parameters; they must still be summed over data
        and context ranks.
        """
        losses, self._losses = self._losses, []
        device = next((layer.loss.device for layer in losses), torch.device("cpu"))
        total = torch.zeros((), device=device)
        for layer in losses:
            total = total + _Precomputed.apply(layer.loss, layer.gradients, *layer.parameters)
        return total

    def _train_student(self, index: int, core: AttentionLayer, args: tuple, output: Tensor) -> None:
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
        self._losses.append(_LayerLoss(loss.detach(), parameters, gradients))

    def _loss_of(self, index: int, student: AttentionLayer, inputs: CapturedInputs, output: Tensor) -> Tensor:
        """This shard's and these heads' part of the loss; adds its statistics to `sums`."""
        tag = partial(HeadTag, layer=index, head=student.query_heads.start)
        # Errors of shards add up to those of whole sequences, which must be counted once.
        count = torch.full((), float(len(inputs.q) if inputs.cp_shard.rank == 0 else 0), device=output.device)
        errors = normalized_errors(inputs.run(student), output, inputs.cp_shard)
        self.sums.add(tag("error"), errors.detach().sum(0), count)
        loss = errors.sum()
        if self._sampled_queries:
            loss = loss + self._query_loss(self._teachers[index], student, inputs, tag)
        return loss / (self._batch_rows * len(student.query_heads) * student.heads.size)

    def _query_loss(
        self,
        teacher: AttentionLayer,
        student: AttentionLayer,
        inputs: CapturedInputs,
        tag: "partial[HeadTag]",
    ) -> Tensor:
        """The sampled queries' part of the loss, before averaging; adds their statistics to `sums`."""
        queries = sample_queries(inputs.length, self._sampled_queries, self._seed, self._step)
        sampled = SampledQueries.of(inputs, queries, student.causal)
        scores = sampled.scores()
        if isinstance(teacher, SoftmaxAttention) and teacher.softcap is None:
            teacher_weights = sampled.softmax(scores, teacher.window)
        else:
            teacher_weights = sampled.weights(teacher.forward)  # past the hooks, which would capture the call
        student_weights = sampled.weights(student)
        values, slopes = cross_entropy(teacher_weights, student_weights, sampled.real)
        if inputs.cp_shard.rank == 0:  # all shards have the same values
            count = torch.full((), float(len(values)), device=values.device)
            self.sums.add(tag("cross_entropy"), values.sum(0), count)
            for name, (sums, counts) in head_statistics(
                sampled, student_weights, teacher_weights, scores, student.near_window
            ).items():
                self.sums.add(tag(name), sums, counts)
        if not self._cross_entropy:
            return values.new_zeros(())
        value = values.sum() if inputs.cp_shard.rank == 0 else values.new_zeros(())
        if torch.is_grad_enabled():
            product = sampled.weighted_sum(student, slopes)
            value = value + product - product.detach()
        return self._cross_entropy * value


class _LayerLoss(NamedTuple):
    """A layer's part of the loss, with its gradients."""

    loss: Tensor
    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor]


class _Precomputed(torch.autograd.Function):
    """Identity with precomputed gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad.to(known.dtype) * known for known in ctx.gradients)


def check_students(teachers: Mapping[int, AttentionLayer], students: Mapping[int, AttentionLayer]) -> None:
    """Raise UserError unless each student can be called with the arguments of its layer's teacher."""
    for index, student in students.items():
        teacher = teachers.get(index)
        reason = "is a layer that the teacher does not have" if teacher is None else _misfit(teacher, student)
        if reason:
            raise UserError(f"attention transfer: layer {index} {reason}")


def _misfit(teacher: AttentionLayer, student: AttentionLayer) -> str | None:
    if student.compresses_input:
        return "makes keys of its compressed input, not of the teacher's keys; set compression.compress: projected"
    if student.keys_per_head != 1:
        keys = student.keys_per_head
        return f"wants {keys} keys at a position, and the teacher has one; take mixture.kind: shifted"
    for name in ("causal", "head_dim", "query_heads", "kv_heads"):
        value, wanted = getattr(student, name), getattr(teacher, name)
        if value != wanted:
            return f"has {name}={value} where the teacher has {wanted}; give both models the same sizes and layout"
    return None


def check_parts_around(student: Model, dense: Model, transfers: bool) -> None:
    """Raise UserError for a layer that lacks parts that the dense model's layer has around its attention.

    transfers: also for a layer with additional parts. An attention transfer trains only mechanisms, and the dense
    output is the wrong target for a mechanism after a new convolution.
    """
    for index, (layer, dense_layer) in enumerate(zip(student.attentions, dense.attentions)):
        at = f"model.attention: layer {index} has"
        for part, wanted in dense_layer.optional_parts.items():
            if (own := layer.optional_parts.get(part)) != wanted:
                raise UserError(
                    f"{at} {part}={json.dumps(own)} and the dense model {json.dumps(wanted)}; set what the dense "
                    "model has"
                )
        if transfers and (more := layer.optional_parts.keys() - dense_layer.optional_parts.keys()):
            raise UserError(
                f"{at} {min(more)}, which the dense model lacks and an attention transfer does not train; remove it, "
                "or train all of the layer (uptrain.transfer: null; objective.kind: distill)"
            )


FLOOR = 1e-8
"""Lower bound of weights in a cross entropy, so that a weight of 0 has a finite gradient."""


def normalized_errors(
    output: Tensor, target: Tensor, cp_shard: ContextParallelShard = WHOLE_SEQUENCE
) -> Tensor:
    """|y' - y|^2 / |y|^2 of each sequence and head, (B, H), for outputs y' and targets y (B, H, n, D), 0 at padding.

    With context parallelism it is the shard's part, to be summed over shards. Float32 or better.
    """
    dtype = accum_dtype(target.dtype)
    output, target = output.to(dtype), target.to(dtype)
    energy = cp_shard.all_reduce(target.square().sum((2, 3)))
    return (output - target).square().sum((2, 3)) / energy.clamp(min=torch.finfo(dtype).tiny)


def cross_entropy(teacher: Tensor, student: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """-sum_j p_ij log w_ij of weights p and w (B, H, R, N), mean over the queries (B, R) that are `real`.

    Returns it, (B, H), and its derivatives by w, (B, H, R, N). Below FLOOR the logarithm is continued linearly.
    """
    count = real.sum(-1).clamp(min=1)[:, None]
    kept = student.clamp(min=FLOOR)
    log = kept.log() + (student - kept) / FLOOR
    return -(teacher * log).sum((2, 3)) / count, -teacher / kept / count[..., None, None]
