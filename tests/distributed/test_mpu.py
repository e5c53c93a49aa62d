"""DeepSpeed on the mesh: any ZeRO stage on any cut has the losses and gradient norms of one process."""

import deepspeed
import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from tests.distributed.ranks import cpu_mesh, run_ranks

WIDTH, INNER, SAMPLES, STEPS, CLIP = 8, 16, 8, 4, 1.4


class Network(nn.Module):
    """A replicated scale and two cut projections."""

    def __init__(self, mesh):
        super().__init__()
        config = TransformerConfig(
            num_layers=1, hidden_size=WIDTH, num_attention_heads=2, use_cpu_initialization=True
        )
        options = {"config": config, "tp_group": mesh.tp.group, "bias": False}
        options["init_method"] = lambda weight: nn.init.normal_(weight, std=0.3)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.up = ColumnParallelLinear(WIDTH, INNER, **options)
        self.down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True, skip_bias_add=True, **options)

    def forward(self, x):
        """x (samples, WIDTH) -> mean squared distance to its reverse."""
        out = x + self.down(torch.tanh(self.up(x * self.scale)[0]))[0]
        return ((out - x.flip(-1)) ** 2).mean()


def train(sizes, stage):
    with cpu_mesh(**sizes) as mesh:
        torch.manual_seed(0)
        model = Network(mesh)
        engine, *_ = deepspeed.initialize(
            model=model,
            # The size of its step follows the size of the gradient, which AdamW would hide.
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": SAMPLES // mesh.gradient.size,
                "gradient_clipping": CLIP,
                "steps_per_print": None,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
            mpu=mesh.mpu,
        )
        x = torch.randn(SAMPLES, WIDTH).chunk(mesh.gradient.size)[mesh.gradient.rank]
        history = []
        for _ in range(STEPS):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            mean = mesh.sum(loss, mesh.gradient) / mesh.gradient.size
            history.append((mean.item(), engine.get_global_grad_norm()))
        losses, norms = zip(*history)
        return losses, [float(norm) for norm in norms if norm is not None]


@pytest.fixture(scope="module")
def alone():
    return run_ranks(train, 1, {}, 1)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world_size", "sizes"), [(2, {}), (2, {"context": 2}), (4, {"tensor": 2})], ids=str)
def test_every_zero_stage_gives_the_losses_and_norms_of_one_process(alone, world_size, sizes, stage):
    losses, norms = alone
    assert max(norms) > CLIP > min(norms), "clipped at first and free at last"
    for actual_losses, actual_norms in run_ranks(train, world_size, sizes, stage):
        # float32 sums in another order, fed back through the steps.
        assert actual_losses == pytest.approx(losses, rel=1e-5)
        # Without ZeRO DeepSpeed clips float32 gradients and keeps their norm to itself.
        assert actual_norms == ([] if stage == 0 else pytest.approx(norms, rel=1e-5))
