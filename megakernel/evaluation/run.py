"""From a run folder to an evaluation: what is cheap to check comes before the libraries are loaded."""

from collections.abc import Callable
from pathlib import Path

from data_pipeline import tokenizers
from data_pipeline.corpus import Corpora
from megakernel.config import Config, UserError
from megakernel.parallel.device import prepare_device
from megakernel.training.run_folder import tokenizer_folder
from megakernel.training.trained_run import TrainedRun

from .result import Evaluation, PositionBucket


def evaluate_run(
    folder: Path,
    *,
    step: int | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    draws: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluate a checkpoint on its run's validation data, in this process.

    Args:
        folder: folder of the run.
        step: which checkpoint; None takes the newest good one.
        samples: validation samples; None takes training.eval_samples. One pass over the corpora at most.
        seq_len: tokens per sample, also more than in training; None takes training.eval_seq_len, else
            training.seq_len.
        draws: average the predicted probabilities over this many draws of the noise that training redraws; None
            takes the draw that training held last.
        progress: called after each batch with the batches done and all batches.

    With the defaults the loss is the eval/loss that training measured at that step.

    Raises:
        UserError: no run, no such checkpoint, no corpus, or values that do not fit them.
    """
    run = TrainedRun.find(folder, step)
    config = evaluated_config(run.config, samples, seq_len)
    if draws is not None:
        _check_draws(draws, config, folder)
    corpora = Corpora(config.data)
    if tokenizers.load(tokenizer_folder(folder)).hash != corpora.tokenizer_hash:
        raise UserError(
            f"data.train={corpora.tokenizer_folder.parent} has another tokenizer now than {folder} was trained with; "
            f"prepare the corpus with --tokenizer {tokenizer_folder(folder)}"
        )
    check_length(config, corpora)
    # Megatron-core and DeepSpeed look for a device, and say so, when they are imported.
    device = prepare_device("cpu" if config.training.device == "cpu" else "auto", local_rank=0)
    from data_pipeline.loader import ValidationBatches
    from data_pipeline.order import Share
    from megakernel.training.bits import bits_per_byte
    from megakernel.training.one_process import one_process_model

    from .classification import measure_examples
    from .perplexity import measure

    batches = ValidationBatches(config, corpora, Share())
    by_position: list[PositionBucket] = []
    accuracy = None
    with one_process_model(run, corpora.vocab_size, device) as model:
        if config.model.classifier is not None:
            tokens, loss, accuracy = measure_examples(model, batches, device, progress, draws)
        else:
            by_position = measure(model, batches, device, progress, draws)
            tokens = sum(bucket.tokens for bucket in by_position)
            loss = sum(bucket.loss * bucket.tokens for bucket in by_position) / tokens
    return Evaluation(
        run=str(folder),
        step=run.checkpoint.step,
        samples=batches.samples,
        seq_len=config.training.seq_len,
        tokens=tokens,
        loss=loss,
        bits_per_byte=bits_per_byte(loss, corpora, "validation") if config.model.is_causal else None,
        accuracy=accuracy,
        by_position=by_position,
        draws=draws,
    )


def evaluate_baseline(
    folder: Path,
    name: str,
    *,
    weights: Path | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Evaluate a model of `transformers` of the run's sizes on the run's validation data, in this process.

    Args:
        folder: folder of the run that it is compared with.
        name: one of `baselines.NAMES`.
        weights: folder of `save_pretrained`; None leaves the model untrained.
        samples, seq_len, progress: as for `evaluate_run`.

    Raises:
        UserError: as `evaluate_run` does, for a name or a run that do not fit each other, and for other weights.
    """
    from .baselines import build_baseline, check_baseline, measure_baseline

    config = evaluated_config(TrainedRun.find(folder).config, samples, seq_len)
    check_baseline(name, config)
    corpora = Corpora(config.data)
    check_length(config, corpora)
    device = prepare_device("cpu" if config.training.device == "cpu" else "auto", local_rank=0)
    from data_pipeline.loader import ValidationBatches
    from data_pipeline.order import Share

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


def evaluated_config(config: Config, samples: int | None, seq_len: int | None) -> Config:
    """The configuration of a run with another evaluation."""
    training = config.training
    samples = training.eval_samples if samples is None else samples
    seq_len = training.evaluation_len if seq_len is None else seq_len
    if samples < 1:
        raise UserError(f"samples={samples} leaves nothing to evaluate; give --samples 1 or more")
    if seq_len < 1:
        raise UserError(f"seq_len={seq_len} leaves nothing to predict; give --seq-len 1 or more")
    rows = config.model.max_positions or training.seq_len
    if config.model.position == "learned" and seq_len > rows:
        raise UserError(
            f"seq_len={seq_len} exceeds the model's {rows} learned positions; give at most {rows}"
        )
    # As many tokens per forward pass as in training, so that longer samples need no more memory.
    rows = max(1, training.micro_batch_size * training.seq_len // seq_len)
    changes = {
        "eval_samples": samples,
        "seq_len": seq_len,
        "eval_seq_len": seq_len,
        "seq_len_schedule": [],
        "micro_batch_size": rows,
    }
    return config.model_copy(update={"training": training.model_copy(update=changes)})


def _check_draws(draws: int, config: Config, folder: Path) -> None:
    if draws < 1:
        raise UserError(f"draws={draws} leaves no vote; give --draws 1 or more")
    if not any(config.model.layer_attention(layer).redraws for layer in range(config.model.num_layers)):
        raise UserError(
            f"draws={draws}: no layer of {folder} has noise that training redraws, so all votes would be the same; "
            "leave out --draws"
        )


def check_length(config: Config, corpora: Corpora) -> None:
    """UserError for samples longer than a validation split."""
    if config.model.classifier is not None:  # its documents are cut or padded to any length
        return
    for corpus in corpora.validation:
        tokens, seq_len = corpus.record("validation").tokens, config.training.seq_len
        if tokens <= seq_len:
            raise UserError(
                f"seq_len={seq_len}: {corpus.folder} has only {tokens} validation tokens; give at most {tokens - 1}"
            )
