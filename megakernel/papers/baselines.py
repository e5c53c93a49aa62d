"""Baselines: models of `transformers` with other efficient attentions, measured on the batches of a run.

They are untrained, or have weights that were trained elsewhere in the shapes of `build_baseline`. Their attention keeps
its default settings, except where a family needs others; BigBird attends fully if a sequence is too short for its
random blocks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from data_pipeline.corpus import Corpora
from data_pipeline.loader import ValidationBatches
from data_pipeline.order import Share
from megakernel.checkpoint.trained_run import TrainedRun
from megakernel.config import Config, UserError
from megakernel.config.errors import first_line
from megakernel.evaluation.language_modelling import check_length, evaluated_config
from megakernel.evaluation.result import Evaluation
from megakernel.evaluation.subject import OnPass
from megakernel.parallel.device import choose_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES = {
    "nystromformer": "Nystromformer",
    "bigbird": "BigBird",
    "longformer": "Longformer",
    "reformer": "Reformer",
}
"""Name -> prefix of its classes in `transformers`."""


def check_baseline(name: str, config: Config) -> None:
    """UserError for an unknown name, or a run whose data or objective these models do not support."""
    if name not in NAMES:
        raise UserError(f"baseline={name} is unknown; choose {', '.join(NAMES)}")
    if config.model.kind in ("causal_lm", "encoder_decoder"):
        raise UserError(f"baseline={name} is an encoder; give a run of a masked_lm or a classifier")
    if config.model.sequences_per_sample > 1:
        raise UserError(
            f"baseline={name} cannot compare two documents; give a run with model.classifier.documents=1"
        )
    if config.model.kind == "masked_lm" and config.data.isolate_documents:
        raise UserError(
            f"baseline={name} sees across the documents of a sequence; give a run with data.isolate_documents=false"
        )


def build_baseline(
    name: str, config: Config, vocab_size: int, weights: Path | None = None
) -> "PreTrainedModel":
    """The model `name` in the configured sizes, in evaluation mode.

    vocab_size: ids of the tokenizer. weights: a folder of `save_pretrained`; None draws them from run.seed. Raises
    UserError for weights of other shapes.
    """
    import transformers

    masked = config.model.kind == "masked_lm"
    family = getattr(transformers, f"{NAMES[name]}For{'MaskedLM' if masked else 'SequenceClassification'}")
    settings = family.config_class(**_sizes(config, vocab_size), **_attention(name, config))
    torch.manual_seed(config.run.seed)
    if weights is None:
        return family(settings).eval()
    try:
        if not weights.is_dir():  # transformers would look for it on the hub
            raise FileNotFoundError("there is no such folder")
        return family.from_pretrained(weights, config=settings).eval()
    # transformers raises several types for a missing folder, foreign files or other shapes.
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"weights={weights} are not those of a {name} in the run's sizes ({first_line(error)})"
        ) from None


def _sizes(config: Config, vocab_size: int) -> dict[str, Any]:
    model = config.model
    # A new id that no text contains: some of these models treat every occurrence of it as padding.
    padding = vocab_size + model.special_ids
    return {
        "vocab_size": padding + 1,
        "pad_token_id": padding,
        "bos_token_id": None,
        "eos_token_id": None,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_size,
        "tie_word_embeddings": model.tie_embeddings,
        "num_labels": model.classifier.num_classes if model.classifier is not None else 2,
        # Some families count positions from the padding id + 1, so the table needs rows beyond it.
        "max_position_embeddings": config.training.seq_len + padding + 1,
    }


def _attention(name: str, config: Config) -> dict[str, Any]:
    """Settings that only one family has; its other settings keep their defaults."""
    seq_len = config.training.seq_len
    if name == "nystromformer":
        landmarks = max(count for count in range(1, 65) if seq_len % count == 0)
        return {"num_landmarks": landmarks, "segment_means_seq_len": seq_len}
    if name == "reformer":
        return {
            "axial_pos_embds": False,
            "attention_head_size": config.model.head_size,
            "feed_forward_size": config.model.ffn_size,
            "attn_layers": [("local", "lsh")[layer % 2] for layer in range(config.model.num_layers)],
            "hash_seed": config.run.seed,
        }
    return {}


@torch.no_grad()
def measure_baseline(
    model: "PreTrainedModel",
    batches: ValidationBatches,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> tuple[int, float, float]:
    """The number of predictions, their mean cross entropy in nats, and the share of right ones.

    progress: called after each forward pass with the passes done and all passes. Raises UserError if nothing is masked.
    """
    predictions, loss, right = 0, 0.0, 0
    for done, batch in enumerate(batches, start=1):
        on_device = batch.to(device)
        mask = (on_device.positions >= 0).long()
        if model.config.model_type == "nystromformer":
            # It adds a 2-d mask as (B, 1, N, N), which does not fit scores of landmarks, but a 4-d one as it is.
            mask = torch.finfo(torch.float32).min * (1 - mask[:, None, None])
        logits = model(input_ids=on_device.tokens, attention_mask=mask).logits[on_device.loss_mask].float()
        labels = on_device.labels[on_device.loss_mask]
        predictions += len(labels)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        right += int((logits.argmax(-1) == labels).sum())
        progress(done, len(batches))
    if not predictions:
        raise UserError(f"no token of the {batches.samples} samples is masked; give more --samples")
    return predictions, loss / predictions, right / predictions


def evaluate_baseline(
    folder: Path,
    name: str,
    *,
    weights: Path | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    progress: OnPass = lambda done, total: None,
) -> Evaluation:
    """Evaluate a model of `transformers` in the run's sizes on the run's validation data, in this process.

    Args:
        folder: folder of the run to compare with.
        name: one of `NAMES`.
        weights: folder of `save_pretrained`; None leaves the model untrained.
        samples, seq_len, progress: as for `evaluate_run`.

    Raises:
        UserError: as `evaluate_run` does, for an unknown name, an unsupported run, and weights of other shapes.
    """
    config = evaluated_config(TrainedRun.find(folder).config, samples, seq_len)
    check_baseline(name, config)
    corpora = Corpora(config.data)
    check_length(config, corpora)
    device = choose_device("cpu" if config.training.device == "cpu" else "auto")
    batches = ValidationBatches(config, corpora, Share())
    model = build_baseline(name, config, corpora.vocab_size, weights).to(device)
    tokens, loss, accuracy = measure_baseline(model, batches, device, progress)
    return Evaluation(
        run=name if weights is None else str(weights),
        step=0,
        samples=batches.samples,
        seq_len=config.training.seq_len,
        tokens=tokens,
        loss=loss,
        bits_per_byte=None,
        accuracy=accuracy,
        by_position=[],
    )
