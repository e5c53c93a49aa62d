"""The configured model as one process builds it."""

from typing import TYPE_CHECKING

from megakernel.config import Config, UserError
from megakernel.model import ModelSettings

if TYPE_CHECKING:
    from megakernel.parallel import Mesh, OneProcess


def model_settings(config: Config, mesh: "Mesh | OneProcess", vocab_size: int) -> ModelSettings:
    """How this process builds its part of the configured model.

    Raises UserError where model.vocab_size is smaller than the tokenizer's vocabulary.
    """
    needed = vocab_size + config.model.special_ids
    wanted = config.model.vocab_size or needed
    if wanted < needed:
        pack_keys = (
            f", and {config.model.special_ids} of a {config.model.kind}" if config.model.special_ids else ""
        )
        source = config.init.source
        remedy = "remove the key or raise it"
        if source is not None:
            remedy = f"prepare the data with the tokenizer of init.from={source}"
        raise UserError(
            f"model.vocab_size={wanted} is smaller than the corpus's tokenizer ({vocab_size} ids{pack_keys}); {remedy}"
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
