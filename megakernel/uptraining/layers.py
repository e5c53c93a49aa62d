"""The attention layers of a model, and which of them can learn from each other."""

from collections.abc import Mapping

from torch import nn

from megakernel.attention import AttentionLayer
from megakernel.attention.softmax import SoftmaxAttention
from megakernel.config import UserError
from megakernel.model.layer import TransformerLayer


def attention_cores(model: nn.Module) -> dict[int, AttentionLayer]:
    """Layer, counted from 0 over all pipeline stages -> its mechanism, of the layers that this process holds."""
    layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    return {layer.index: layer.self_attention.core for layer in layers}


def converted_cores(model: nn.Module) -> dict[int, AttentionLayer]:
    """`attention_cores` without those that are still full softmax."""
    cores = attention_cores(model)
    return {index: core for index, core in cores.items() if not isinstance(core, SoftmaxAttention)}


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
        ours, theirs = getattr(student, name), getattr(teacher, name)
        if ours != theirs:
            return f"has {name}={ours} where the teacher has {theirs}; give both models the same sizes and layout"
    return None
