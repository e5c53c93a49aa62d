"""Attention transfer: each mechanism learns from the dense layer, on that layer's inputs."""

import pytest
import torch

from megakernel import attention
from megakernel.checkpoint.sharded_load import whole_shapes
from megakernel.checkpoint.whole_tensors import partitions
from megakernel.config import Model, UserError
from megakernel.config.training import NearDropout
from megakernel.model import IGNORED, LanguageModel, ModelSettings
from megakernel.model.layer import attention_cores, converted_cores
from megakernel.training.optimizer import freeze
from megakernel.training.schedule import add_near_dropout
from megakernel.uptraining.distillation import Teacher
from megakernel.uptraining.layer_transfer import LayerTransfer
from megakernel.uptraining.sampled_queries import CapturedInputs, SampledQueries, sample_queries
from megakernel.uptraining.transfer import AttentionTransfer
from tests.unit.config.trees import config

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_multiple": 32}
FLURKA = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}}
ROWS, LENGTH, QUERIES = 2, 13, 5
LAMBDA = 0.3


def build(mesh, attention, **parts):
    """A model with random weights, equal for equal names outside of the mechanisms."""
    settings = ModelSettings(Model(**SIZES | parts, attention=attention), vocab_size=32, mesh=mesh)
    model = LanguageModel(settings)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            seed = 1000 + index if ".core." in name else hash_of(name)
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return model.double()


def mechanisms(student):
    """Freeze all but the mechanisms; name -> parameter that is still trained."""
    freeze(student, "mechanism")
    return {name: x for name, x in student.named_parameters() if x.requires_grad}


def hash_of(name):
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(name))


def layer_inputs(rows=ROWS):
    """Packed documents whose boundaries are not at block boundaries."""
    tokens = torch.randint(32, (rows, LENGTH), generator=torch.Generator().manual_seed(2))
    positions = torch.stack([torch.arange(LENGTH), torch.cat([torch.arange(6), torch.arange(7)])])[:rows]
    return tokens, positions, torch.full_like(tokens, IGNORED), torch.ones(1)


def run(teacher, layer_inputs):
    with torch.no_grad():
        for layer in teacher.layers[:-1]:
            layer_inputs = layer(layer_inputs)


def transferred(teacher, students, step=0, **options):
    """Attention transfer that has captured one pass of the teacher."""
    transfer = AttentionTransfer(teacher, students, **options)
    transfer.begin(step, batch_rows=ROWS)
    with transfer:
        run(teacher, layer_inputs())
    return transfer


def capture_calls(teacher, layer_inputs):
    """Inputs and output of each attention layer of the teacher."""
    captured = {}
    hooks = [
        core.register_forward_hook(
            lambda _, args, out, index=index: captured.update({index: (CapturedInputs.of(*args), out)})
        )
        for index, core in attention_cores(teacher).items()
    ]
    run(teacher, layer_inputs)
    for hook in hooks:
        hook.remove()
    return captured


def reference_loss(student, captured, step):
    """The same loss from its formula, in one autograd graph."""
    total = 0.0
    for index, (inputs, target) in captured.items():
        core = attention_cores(student)[index]
        error = (inputs.run(core) - target).square().sum((2, 3)) / target.square().sum((2, 3))
        rows = SampledQueries.of(inputs, sample_queries(LENGTH, QUERIES, 7, step), causal=True)
        teacher_weights = rows.softmax(rows.scores())
        one_hot = torch.eye(LENGTH, dtype=torch.float64).expand(*inputs.k.shape[:2], -1, -1)
        weights = inputs.run(core, one_hot)[:, :, rows.queries]
        logs = weights.masked_fill(~rows.visible[:, None], 1.0).log()
        total = total + (error - LAMBDA * (teacher_weights * logs).sum(-1).mean(-1)).mean()
    return total


def test_loss_and_gradients_equal_those_of_one_autograd_graph(mesh):
    teacher, student = build(mesh, "softmax"), build(mesh, FLURKA)
    trained = mechanisms(student)
    options = {"sampled_queries": QUERIES, "cross_entropy": LAMBDA, "seed": 7}
    loss = transferred(teacher, converted_cores(student), step=3, **options).loss()
    loss.backward()
    expected_loss = reference_loss(student, capture_calls(teacher, layer_inputs()), step=3)
    torch.testing.assert_close(loss, expected_loss)
    expected = torch.autograd.grad(expected_loss, list(trained.values()))
    assert len(expected) == 2 * 5
    for (name, parameter), gradient in zip(trained.items(), expected):
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-12)
    others = [x for x in student.parameters() if not any(x is own for own in trained.values())]
    assert all(x.grad is None for x in others + list(teacher.parameters()))


def test_micro_batches_add_up_to_the_batch(mesh):
    teacher, student = build(mesh, "softmax"), build(mesh, FLURKA)
    transfer = AttentionTransfer(teacher, converted_cores(student), sampled_queries=QUERIES)
    transfer.begin(step=0, batch_rows=ROWS)
    found = []
    for parts in ([slice(0, 2)], [slice(0, 1), slice(1, 2)]):
        student.zero_grad()
        transfer.sums.clear()
        losses = []
        for part in parts:
            with transfer:
                run(teacher, tuple(x[part] if x.dim() == 2 else x for x in layer_inputs()))
            losses.append(transfer.loss())
            losses[-1].backward()
        gradients = [x.grad for x in mechanisms(student).values()]
        found.append((sum(losses), gradients, transfer.sums.means(lambda own: [own])))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_a_window_as_long_as_the_sequence_has_no_error(mesh):
    """As in the preflight: such a student equals the dense model."""
    wide = {"preset": "flurka", "compression": {"block_size": 16, "rank": 2}}
    teacher, student = build(mesh, "softmax"), build(mesh, wide).eval()
    transfer = transferred(teacher, converted_cores(student), sampled_queries=QUERIES)
    assert transfer.loss() < 1e-28
    means = transfer.sums.means(lambda own: [own])
    for layer in range(2):
        assert means["error"][layer].shape == (4,)
        assert means["error"][layer].max() < 1e-28
        torch.testing.assert_close(means["rank_correlation"][layer], torch.ones(4).double())
        for pair in (("entropy", "teacher_entropy"), ("cross_entropy", "teacher_entropy")):
            torch.testing.assert_close(*(means[name][layer] for name in pair))
        assert means["far_mass"][layer].isnan().all()


@pytest.mark.parametrize(
    "config", [{"preset": "softmax", "window": 4}, {"preset": "local", "near": {"block_size": 4}}]
)
def test_a_windowed_teacher_is_compared_within_its_window(mesh, config):
    teacher, student = build(mesh, config), build(mesh, config).eval()
    cores = attention_cores(student)
    means = transferred(teacher, cores, sampled_queries=LENGTH).sums.means(lambda own: [own])
    for layer in cores:
        for pair in (("entropy", "teacher_entropy"), ("cross_entropy", "teacher_entropy")):
            torch.testing.assert_close(*(means[name][layer] for name in pair))


def test_the_loss_is_the_mean_over_the_batch_of_the_steps_phase(mesh):
    teacher, student = build(mesh, "softmax"), build(mesh, FLURKA)
    given = config(
        training={"seq_len_schedule": [{"until_step": 5, "seq_len": 64, "global_batch_size": 2}]},
        objective={"kind": "transfer", "teacher": "runs/dense"},
    )
    transfer = LayerTransfer(student, Teacher(teacher), given, mesh)
    losses = []
    for step in (4, 5):
        transfer.begin_step(step)
        losses.append(transfer(layer_inputs()))
    torch.testing.assert_close(losses[0], losses[1] * (given.training.global_batch_size / 2))


def test_a_teacher_shares_frozen_weights_that_are_equal(mesh):
    """Also with partly trained students: the teacher keeps weights that differ as its own."""
    dense, student = build(mesh, "softmax"), build(mesh, FLURKA)
    mechanisms(student)
    teacher_weights, student_weights = dict(dense.named_parameters()), dict(student.named_parameters())
    moved, trained = [name for name in teacher_weights if ".mlp." in name][:2]
    student_weights[moved].data.add_(1)
    student_weights[trained].requires_grad_()
    before = {name: x.clone() for name, x in teacher_weights.items()}
    Teacher(dense).share_weights(student)
    own = {name for name, x in teacher_weights.items() if x.data_ptr() != student_weights[name].data_ptr()}
    assert own == {moved, trained}
    assert all(x.equal(before[name]) for name, x in teacher_weights.items())


def test_steps_lower_the_error_and_hooks_are_removed_afterwards(mesh):
    teacher, student = build(mesh, "softmax"), build(mesh, FLURKA)
    optimizer = torch.optim.SGD(mechanisms(student).values(), lr=1e-2)
    transfer = AttentionTransfer(teacher, converted_cores(student))
    losses = []
    for step in range(3):
        transfer.begin(step, ROWS)
        with transfer:
            run(teacher, layer_inputs())
        losses.append(transfer.loss())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    run(teacher, layer_inputs())
    assert transfer.loss() == 0


def test_only_the_mechanisms_are_trained(mesh):
    student = build(mesh, FLURKA)
    names = mechanisms(student)
    assert {name.split(".self_attention.core.")[1] for name in names} == {
        "pool_keys",
        "pool_values",
        "gate_bias",
        "gate_weight",
        "projection.matrix",
    }
    with pytest.raises(UserError, match=r"optimizer.trained=mechanism .* no weights"):
        freeze(build(mesh, "linear"), "mechanism")


@pytest.mark.parametrize(
    ("student", "reason"),
    [
        ({"num_kv_heads": 4}, r"kv_heads=range\(0, 4\) where the teacher has range\(0, 2\)"),
        ({"head_dim": 8}, "head_dim=8 where the teacher has 4"),
        ({"num_layers": 3}, "layer 2 is a layer that the teacher does not have"),
        ({"attention": "mlk"}, r"layer 0 wants 2 keys at a position, .* take mixture.kind: shifted"),
    ],
)
def test_a_student_that_does_not_fit_the_teacher_is_refused(mesh, student, reason):
    student = build(mesh, **{"attention": FLURKA} | student)
    with pytest.raises(UserError, match=reason):
        AttentionTransfer(build(mesh, "softmax"), converted_cores(student))


def test_a_teacher_with_gradients_is_refused(mesh):
    teacher = build(mesh, "softmax")
    transfer = AttentionTransfer(teacher, converted_cores(build(mesh, FLURKA)))
    with transfer, pytest.raises(RuntimeError, match="no_grad"):
        teacher(*layer_inputs())


def test_kept_softmax_layers_are_not_converted(mesh):
    hybrid = build(mesh, FLURKA, attention_pattern=["softmax", "main"])
    assert list(converted_cores(hybrid)) == [1]
    assert isinstance(attention_cores(hybrid)[0], attention.softmax.SoftmaxAttention)


def test_near_dropout_decays_to_zero(mesh):
    student = build(mesh, FLURKA)
    add_near_dropout(student, NearDropout(start=1.0, steps=4), seed=3)
    cores = attention_cores(student)
    shares = []
    for step in range(6):
        attention.redraw(student, step)
        shares.append([core.near_dropout.dropped.double().mean().item() for core in cores.values()])
    assert shares[0] == [1.0, 1.0]
    assert shares[4] == shares[5] == [0.0, 0.0]
    falling = NearDropout(start=0.8, steps=4)
    assert [falling.probability(step) for step in (0, 1, 4, 9)] == pytest.approx([0.8, 0.6, 0, 0])
    # The dropout adds no tensors that a checkpoint would lack.
    assert whole_shapes(student, partitions(student), mesh.tp).keys() == partitions(student).keys()


@pytest.mark.parametrize("attention", ["flurka_kernel", "softmax"])
def test_near_dropout_without_gates_is_refused(attention, mesh):
    with pytest.raises(UserError, match=r"^training.near_dropout .* model.attention has none; take near"):
        add_near_dropout(build(mesh, attention), NearDropout(start=1.0, steps=4), seed=3)
