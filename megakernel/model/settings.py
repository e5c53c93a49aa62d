"""The settings that layers are built from, Megatron-core's TransformerConfig among them."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megakernel.config import Config, Lora, Model, UserError
from megakernel.config.training import Recompute

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megakernel.parallel import Mesh, OneProcess
    from megakernel.parallel.axis import Axis

    from .start import LayerStart
    from .vocabulary_loss import ZLoss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""training.dtype -> torch dtype."""


@dataclass(frozen=True)
class ModelSettings:
    """Everything that layers need to build this rank's part of the model."""

    model: Model
    """Sizes and parts of layers."""

    vocab_size: int
    """Vocabulary size without padding."""

    mesh: "Mesh | OneProcess"
    """Process groups and this process's ranks in them; `OneProcess` has no other ranks."""

    seed: int = 0
    """Run seed: weights are functions of (seed, layer), drawn whole and then partitioned."""

    start: "LayerStart | None" = None
    """Who draws which layer and where it goes once it is built; None: this process draws all, on the host."""

    isolate_documents: bool = True
    """Whether tokens attend only within their document; otherwise a sequence counts as one document."""

    recompute: Recompute = "none"
    """Activation checkpointing: what backward recomputes."""

    compile: bool = False
    """Whether torch.compile runs the layers' bodies; only the engine of training asks for it."""

    offload: bool = False
    """Whether the inputs of recomputed layers are kept in host memory."""

    mlp_chunk_size: int | None = None
    """Tokens whose inner MLP activations exist at once; None: all."""

    loss_chunk_size: int = 4096
    """Tokens whose logits exist at once."""

    z_loss: "ZLoss | None" = None
    """The z-loss of training, and its value in the last step; None: none."""

    lora: Lora | None = None
    """Low-rank updates of attention and MLP matrices; None: none."""

    shapes_only: bool = False
    """Whether matrices are on the meta device, for names, shapes and dtypes only; in a single process."""

    @property
    def copies(self) -> "Axis | None":
        """The tensor ranks that hold the same key head: see `Mesh.copies`."""
        return self.mesh.copies(self.model.kv_heads)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of embedding and head over all tensor ranks, padding included."""
        return self.model.padded_vocab_size(self.vocab_size)

    @property
    def local_vocab_size(self) -> int:
        """Rows of embedding and head on this tensor rank that are not padding; padding comes last."""
        rows = self.padded_vocab_size // self.mesh.tp.size
        return min(max(self.vocab_size - self.mesh.tp.rank * rows, 0), rows)

    @property
    def device(self) -> str | None:
        """Device of new matrices; None: torch's default device."""
        return "meta" if self.shapes_only else None

    def init_method(self, outputs: int, *, ends_branch: bool = False) -> Callable[[Tensor], Any]:
        """Initializes a whole matrix (rows, inputs), as model.init says.

        outputs: rows of each of the matrices that are stacked in it. ends_branch: of an output projection, whose normal
        numbers have the standard deviation init_std / sqrt(2 num_layers).
        """
        if self.model.init == "normal":
            std = self.model.init_std / (math.sqrt(2 * self.model.num_layers) if ends_branch else 1)
            return partial(self.draw, fill=partial(_init_normal, std=std))
        outputs_or_none = outputs if self.model.init == "xavier" else None
        return partial(self.draw, fill=partial(_init_uniform, outputs=outputs_or_none))

    def init_bias(
        self, bias: Tensor | None, inputs: int, shard: Callable[[Tensor], Tensor], size: int
    ) -> None:
        """Initialize a bias: 0, which it is, or as model.init says: `shard` of `size` numbers of all ranks."""
        if bias is not None and self.model.init == "uniform" and not bias.is_meta:
            whole, bound = torch.empty(size, device="cpu"), inputs**-0.5
            self.draw(whole, lambda numbers: numbers.uniform_(-bound, bound))
            with torch.no_grad():
                bias.copy_(shard(whole))

    @property
    def embedding_init_method(self) -> Callable[[Tensor], Any]:
        """Initializes an embedding."""
        return partial(self.draw, fill=partial(_init_normal, std=self.model.embedding_std))

    def draw(self, matrix: Tensor, fill: Callable[[Tensor], object]) -> None:
        """Fill a whole matrix, inside `seeded_by`, if this rank draws it. fill: draws from torch's generator."""
        if self.start is None:
            fill(matrix)
        else:
            self.start.draw(matrix, fill)

    @property
    def transformer(self) -> "TransformerConfig":
        """Configuration of Megatron-core's linear layers."""
        from megatron.core.transformer.transformer_config import TransformerConfig

        model = self.model
        return TransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_heads,
            num_query_groups=model.kv_heads,
            add_bias_linear=model.bias,
            tensor_model_parallel_size=self.mesh.tp.size,
            sequence_parallel=self.mesh.sequence_parallel,
            # Whole matrices are drawn on the CPU and then partitioned, so that the layout does not change them.
            use_cpu_initialization=True,
        )


def _init_normal(matrix: Tensor, std: float) -> None:
    if not matrix.is_meta:  # nothing to fill, and torch would import its compiler
        nn.init.normal_(matrix, std=std)


def _init_uniform(matrix: Tensor, outputs: int | None) -> None:
    """Uniform within 1 / sqrt(inputs), or, with `outputs`, within sqrt(6 / (inputs + outputs)) (Glorot)."""
    if not matrix.is_meta:
        inputs = matrix.shape[1]
        bound = inputs**-0.5 if outputs is None else math.sqrt(6 / (inputs + outputs))
        nn.init.uniform_(matrix, -bound, bound)


@contextmanager
def seeded_by(seed: int, *place: int | str) -> Iterator[None]:
    """Make random draws inside functions of (seed, place), and restore the generator's state afterwards."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        yield


def model_settings(config: Config, mesh: "Mesh | OneProcess", vocab_size: int) -> ModelSettings:
    """Settings of the configured model on this rank.

    UserError if model.vocab_size is smaller than the tokenizer's vocabulary.
    """
    from .vocabulary_loss import ZLoss

    needed = vocab_size + config.model.special_ids
    wanted = config.model.vocab_size or needed
    if wanted < needed:
        special = (
            f", and {config.model.special_ids} of a {config.model.kind}" if config.model.special_ids else ""
        )
        source = config.init.source
        remedy = "remove the key or raise it"
        if source is not None:
            remedy = f"prepare the data with the tokenizer of init.from={source}"
        raise UserError(
            f"model.vocab_size={wanted} is smaller than the corpus's tokenizer ({vocab_size} ids{special}); {remedy}"
        )
    model = config.model
    if model.max_positions is None:
        model = model.model_copy(update={"max_positions": config.training.seq_len})
    return ModelSettings(
        model=model,
        vocab_size=wanted,
        mesh=mesh,
        seed=config.run.seed,
        isolate_documents=config.data.isolate_documents and model.kind in ("causal_lm", "masked_lm"),
        recompute=config.training.activation_checkpointing,
        offload=config.training.checkpoint_offload,
        mlp_chunk_size=config.training.mlp_chunk_size,
        loss_chunk_size=config.training.loss_chunk_size,
        z_loss=ZLoss(config.training.z_loss) if config.training.z_loss else None,
        lora=config.optimizer.updates,
    )
