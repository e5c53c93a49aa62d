"""From our model section to Megatron-core's TransformerConfig, and the one object that layers are built from."""

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

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the name in training.dtype."""


@dataclass(frozen=True)
class ModelSettings:
    """Everything a layer needs to build its part of the model on this process."""

    model: Model
    """Sizes and layer parts."""

    vocab_size: int
    """Vocabulary size; rows of the embedding beyond it are padding and never count."""

    mesh: "Mesh | OneProcess"
    """Where this process stands among the others, or that there are none."""

    seed: int = 0
    """Run seed: weights are drawn from (seed, layer) alone, whole, and then cut."""

    isolate_documents: bool = True
    """Whether attention follows each token's position in its document, or takes every sequence for one document."""

    recompute: Recompute = "none"
    """What backward computes again instead of keeping."""

    offload: bool = False
    """Whether the inputs of layers that backward computes again wait in host memory."""

    mlp_chunk_size: int | None = None
    """Tokens whose inner MLP activations exist at once; None: all."""

    loss_chunk_size: int = 4096
    """Tokens whose logits exist at once."""

    lora: Lora | None = None
    """Low-rank updates of the attention's projections; None: there are none."""

    shapes_only: bool = False
    """Whether matrices take no memory: of a model of one process that is asked for names, shapes and dtypes alone."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head over all tensor ranks, padding included."""
        return self.model.padded_vocab_size(self.vocab_size)

    @property
    def local_vocab_size(self) -> int:
        """How many of this tensor rank's rows are of the vocabulary, the first ones; the others are padding."""
        rows = self.padded_vocab_size // self.mesh.tp.size
        return min(max(self.vocab_size - self.mesh.tp.rank * rows, 0), rows)

    @property
    def device(self) -> str | None:
        """Where matrices are made; None: where torch makes tensors."""
        return "meta" if self.shapes_only else None

    @property
    def draw(self) -> Callable[[Tensor], Any]:
        """Fills a matrix with numbers of standard deviation init_std."""
        return partial(_draw, std=self.model.init_std)

    @property
    def draw_output(self) -> Callable[[Tensor], Any]:
        """The same for a matrix at the end of a branch: smaller, the more branches add up."""
        return partial(_draw, std=self.model.init_std / math.sqrt(2 * self.model.num_layers))

    @property
    def transformer(self) -> "TransformerConfig":
        """What Megatron-core's matrices ask for."""
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
            # Whole matrices are drawn on the CPU and then cut, so that the layout does not change the numbers.
            use_cpu_initialization=True,
        )


def _draw(matrix: Tensor, std: float) -> None:
    if not matrix.is_meta:  # there is nothing to fill, and torch would import its compiler to say so
        nn.init.normal_(matrix, std=std)


@contextmanager
def drawn_from(seed: int, *place: int | str) -> Iterator[None]:
    """Make every random draw inside a function of (seed, place) alone, and leave the generator as it was."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        yield


def model_settings(config: Config, mesh: "Mesh | OneProcess", vocab_size: int) -> ModelSettings:
    """How this process builds its part of the configured model.

    Raises UserError where model.vocab_size is smaller than the tokenizer's vocabulary.
    """
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
        isolate_documents=config.data.isolate_documents and model.classifier is None,
        recompute=config.training.activation_checkpointing,
        offload=config.training.checkpoint_offload,
        mlp_chunk_size=config.training.mlp_chunk_size,
        loss_chunk_size=config.training.loss_chunk_size,
        lora=config.optimizer.updates,
    )
