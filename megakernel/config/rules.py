"""Rules across sections.

Every function here that returns problems is a rule. Its parameters name the sections that it reads; it runs if these
are valid, whatever problems other sections have (`checks.py`).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .attention import Attention
from .data import Data
from .data_phases import mixtures
from .errors import MISSING, Problem, nearest_multiples
from .init import Init
from .model import Model
from .objective import Objective
from .parallel import Parallel
from .training import Logging, Optimizer, Schedule, Training
from .uptrain import Uptrain


def monitoring_has_the_layers_it_needs(
    logging: Logging, model: Model, parallel: Parallel
) -> Iterator[Problem]:
    """Samples need a process with the whole model, plots one with all layers."""
    if logging.analysis_every is not None and parallel.pipeline > 1:
        reason = f"needs all layers in one process, and parallel.pipeline={parallel.pipeline} splits them"
        remedy = "remove it; `megakernel analyze RUN` takes checkpoints of every layout"
        yield Problem("logging.analysis_every", logging.analysis_every, reason, remedy)
    if logging.sample_prompt is None:
        return
    if not model.is_causal:
        reason = f"needs model.kind: causal_lm, and it is {model.kind}"
        yield Problem("logging.sample_prompt", logging.sample_prompt, reason, "remove it")
    sizes = {"tensor": parallel.tensor, "context": parallel.context, "pipeline": parallel.pipeline}
    shared = [f"parallel.{key}={size}" for key, size in sizes.items() if size > 1]
    shared += ["parallel.zero_stage=3"] * (parallel.zero_stage == 3)
    if shared:
        reason = f"needs a process that holds the whole model, and {shared[0]} splits it"
        remedy = "remove it; `megakernel generate RUN` takes checkpoints of every layout"
        yield Problem("logging.sample_prompt", logging.sample_prompt, reason, remedy)


def _tensor_ranks_share_evenly(model: Model, parallel: Parallel) -> Iterator[Problem]:
    yield from heads_over_tensor_ranks(model, parallel.tensor)
    sizes = {"ffn_hidden_size": model.ffn_size, "vocab_multiple": model.vocab_multiple}
    yield from _not_multiples(sizes, parallel.tensor)


def heads_over_tensor_ranks(model: Model, tensor: int) -> Iterator[Problem]:
    """Whole heads on every tensor rank; with fewer key heads than ranks, equally many ranks for each."""
    keys, ranks = model.kv_heads, tensor // model.kv_heads
    yield from _not_multiples({"num_heads": model.num_heads}, tensor)
    if keys >= tensor:
        if keys != model.num_heads:
            yield from _not_multiples({"num_kv_heads": keys}, tensor)
    elif model.num_heads % tensor:
        return
    elif tensor % keys:
        fits = [
            n
            for n in range(1, model.num_heads + 1)
            if model.num_heads % n == 0 and not (n % keys and keys % n)
        ]
        around = [max(n for n in fits if n < tensor), *[n for n in fits if n > tensor][:1]]
        reason = f"is neither a multiple nor a divisor of model.num_kv_heads={keys}"
        yield Problem("parallel.tensor", tensor, reason, f"set {' or '.join(map(str, around))}")
    elif model.head_size % ranks:
        shared = f"gives each of model.num_kv_heads={keys} to {ranks} ranks"
        reason = f"{shared}, which do not divide its {model.head_size} rows"
        remedy = f"set {keys * math.gcd(ranks, model.head_size)}"
        yield Problem("parallel.tensor", tensor, reason, remedy)
    elif choosing := [key for key, attention in _named_attentions(model) if attention.selection is not None]:
        reason = (
            f"exceeds model.num_kv_heads={keys}, and in {' and '.join(choosing)} all queries of a key head choose "
            "blocks together, on one rank"
        )
        yield Problem("parallel.tensor", tensor, reason, f"set {keys} or a divisor of it")


def _not_multiples(sizes: Mapping[str, int], tensor: int) -> Iterator[Problem]:
    for key, size in sizes.items():
        if size % tensor:
            reason = f"is not a multiple of parallel.tensor={tensor}"
            remedy = f"set {nearest_multiples(size, tensor)} or change parallel.tensor"
            yield Problem(f"model.{key}", size, reason, remedy)


def _every_stage_has_layers(model: Model, parallel: Parallel) -> Iterator[Problem]:
    if model.num_layers < parallel.pipeline:
        reason = f"exceeds model.num_layers={model.num_layers}"
        yield Problem("parallel.pipeline", parallel.pipeline, reason, f"set at most {model.num_layers}")


def _regression_has_no_pipeline(model: Model, parallel: Parallel) -> Iterator[Problem]:
    if parallel.pipeline > 1 and model.classifier is not None and model.classifier.num_classes == 1:
        reason = "sends labels between stages, and DeepSpeed requires gradients of the numeric labels of regression"
        remedy = "set it to 1, or model.classifier.num_classes to 2 or more"
        yield Problem("parallel.pipeline", parallel.pipeline, reason, remedy)


def _sequence_is_sharded_evenly(model: Model, parallel: Parallel, training: Training) -> Iterator[Problem]:
    sharded = parallel.tensor if parallel.sequence_parallel else 1
    blocks, windows = [1], [1]
    if parallel.context > 1:
        for attention in model.attentions:
            if attention.block_size is not None and not attention.uses_ulysses(model.is_causal):
                blocks.append(attention.block_size)
                windows.append(attention.block_size * (attention.near.blocks if attention.near else 1))
            windows.append((attention.short_convolution or 1) - 1)
    unit = parallel.context * math.lcm(sharded, *blocks)
    shortest = -(-parallel.context * max(windows) // unit) * unit
    wrong = {k: n for k, n in _lengths(training).items() if n % unit or n < shortest}
    if not wrong:
        return
    needs = [f"shards for parallel.context={parallel.context}"] if parallel.context > 1 else []
    if max(blocks) > 1:
        needs.append(f"whole blocks of {' and '.join(map(str, sorted(set(blocks) - {1})))} tokens in each")
    if max(windows) > max(blocks):
        needs.append(f"windows of {max(windows)} tokens within each")
    if sharded > 1:
        needs.append(f"shards for sequence_parallel over tensor={sharded}")
    for key, length in wrong.items():
        longer = max(nearest_multiples(length, unit).split(" or ")[-1], str(shortest), key=int)
        shorter = length // unit * unit
        choice = f"{shorter} or {longer}" if shortest <= shorter < int(longer) else longer
        yield Problem(key, length, f"does not give {', '.join(needs)}", f"set {choice}")


def _lengths(training: Training) -> dict[str, int]:
    """Sequence lengths of all phases and of evaluation, by key."""
    lengths = {f"{phase.key}.seq_len": phase.training.seq_len for phase in training.phases}
    if training.eval_seq_len is not None:
        lengths["training.eval_seq_len"] = training.eval_seq_len
    return lengths


def _only_rope_has_phases_of_rope(model: Model, training: Training) -> Iterator[Problem]:
    for phase in training.phases:
        phase_model = phase.model(model)
        if model.position != "rope" and phase_model != model:
            key = "rope_base" if phase_model.rope_base != model.rope_base else "rope_scaling"
            reason = f"has no effect on model.position: {model.position}"
            remedy = "remove it or take model.position: rope"
            yield Problem(f"{phase.key}.{key}", getattr(phase_model, key), reason, remedy)


def _frequencies_are_for_the_sequences(model: Model, training: Training) -> Iterator[Problem]:
    for phase in training.phases:
        scaling, length = phase.model(model).rope_scaling, phase.training.seq_len
        if scaling.depends_on_length and scaling.target_seq_len < length:
            wanted = f"{phase.key}.seq_len is {length}"
            reason = f"computes frequencies for sequences of {scaling.target_seq_len} tokens, and {wanted}"
            remedy = f"set model.rope_scaling.seq_len={length}"
            yield Problem("model.rope_scaling.kind", scaling.kind, reason, remedy)


def _ulysses_divides_the_heads(model: Model, parallel: Parallel, training: Training) -> Iterator[Problem]:
    if parallel.context == 1 or model.num_heads % parallel.tensor:
        return
    heads = model.num_heads // parallel.tensor
    if heads % parallel.context == 0:
        return
    forced = parallel.softmax_exchange == "heads"
    shortest = min(_lengths(training).values()) // parallel.context
    ulysses = [
        (key, attention)
        for key, attention in _named_attentions(model)
        if attention.uses_ulysses(model.is_causal)
        and not (parallel.softmax_exchange == "auto" and attention.reads_neighbor(shortest))
    ]
    keys = [key for key, attention in ulysses if not attention.supports_ring_attention]
    softmax = [key for key, attention in ulysses if attention.supports_ring_attention]
    if keys:
        reason = (
            f"does not divide the {heads} heads of a tensor rank, which the all-to-all (Ulysses) of "
            f"{' and '.join(keys)} needs"
        )
        remedy = "set a divisor of the heads, or take similarity: kernel"
        yield Problem("parallel.context", parallel.context, reason, remedy)
    if softmax and forced:
        reason = (
            f"needs heads that divide over parallel.context={parallel.context}, and a tensor rank has {heads} "
            f"in {' and '.join(softmax)}"
        )
        yield Problem("parallel.softmax_exchange", "heads", reason, "set ring or auto")


def _softcap_excludes_ring_attention(model: Model, parallel: Parallel) -> Iterator[Problem]:
    if parallel.context == 1 or parallel.softmax_exchange != "ring":
        return
    capped = [key for key, attention in _named_attentions(model) if attention.softcap is not None]
    if capped:
        reason = f"does not support softcap, which {' and '.join(capped)} sets"
        yield Problem("parallel.softmax_exchange", "ring", reason, "set auto or heads")


def _layers_that_share_landmarks_are_together(model: Model, parallel: Parallel) -> Iterator[Problem]:
    """E and F that layers share are the first one's, which must be in the same process and whole."""
    compressions = [attention.compression for attention in model.attentions]
    sharing = {
        f"{key}.compression.share_layers": compressions.count(attention.compression)
        for key, attention in _named_attentions(model)
        if getattr(attention.compression, "share_layers", False)
    }
    for key, layers in sharing.items():
        if layers == 1:
            yield Problem(key, True, "has no effect: no other layer has this compression", "remove it")
    if not sharing:
        return
    reason = f"parts layers that use one E and F ({' and '.join(sharing)})"
    if parallel.pipeline > 1:
        yield Problem("parallel.pipeline", parallel.pipeline, reason, "set 1, or share_layers: false")
    if parallel.zero_stage == 3:
        reason = f"gathers the weights of one layer at a time, and others use its E and F ({' and '.join(sharing)})"
        yield Problem("parallel.zero_stage", 3, reason, "set 2, or share_layers: false")


def _bfloat16_has_master_weights(parallel: Parallel, training: Training) -> Iterator[Problem]:
    if parallel.zero_stage == 0 and training.dtype == "bfloat16":
        reason = "has no float32 master weights in DeepSpeed, which training.dtype=bfloat16 needs"
        remedy = "set zero_stage to 1 or training.dtype to float32"
        yield Problem("parallel.zero_stage", 0, reason, remedy)


def _positions_reach_the_end(model: Model, training: Training) -> Iterator[Problem]:
    if model.max_positions is not None and model.max_positions < training.seq_len:
        reason = f"is less than training.seq_len={training.seq_len}"
        yield Problem("model.max_positions", model.max_positions, reason, f"set at least {training.seq_len}")


def _mechanisms_suit_causality(model: Model) -> Iterator[Problem]:
    kind = model.kind
    for key, attention in _named_attentions(model):
        is_of_encoder = kind not in ("causal_lm", "encoder_decoder") or key == ENCODER_ATTENTION
        if is_of_encoder and attention.looks_back_only:
            whose = "the encoder" if key == ENCODER_ATTENTION else f"model.kind: {kind}"
            reason = f"does not suit {whose}, whose tokens see each other: "
            remedy = "take softmax, linear, performer or hedgehog"
            remedy += "" if key == ENCODER_ATTENTION else ", or model.kind: causal_lm"
            yield Problem(key, MISSING, reason + attention.looks_back_only, remedy)
        if not is_of_encoder and attention.mixes_future_tokens:
            whose = (
                "model.kind: causal_lm"
                if kind == "causal_lm"
                else "the decoder of model.kind: encoder_decoder"
            )
            reason = f"is not for {whose}: {attention.mixes_future_tokens}"
            remedy = "use compression: {kind: block} with near"
            remedy += ", or model.kind: masked_lm" if kind == "causal_lm" else ""
            yield Problem(key, MISSING, reason, remedy)


def _documents_are_isolated_where_possible(model: Model, data: Data) -> Iterator[Problem]:
    if model.kind != "masked_lm" or not data.isolate_documents:
        return
    for key, attention in _named_attentions(model):
        if attention.mixes_documents:
            reason = f"cannot hold for {key}: {attention.mixes_documents}"
            yield Problem("data.isolate_documents", True, reason, "set false")


def _classifiers_have_no_context_parallelism(model: Model, parallel: Parallel) -> Iterator[Problem]:
    if model.kind == "classifier" and parallel.context > 1:
        reason = "would split documents, which a classifier pads and pools as a whole"
        remedy = "set 1; parallel.tensor with sequence_parallel shares long sequences too"
        yield Problem("parallel.context", parallel.context, reason, remedy)


def _encoder_decoders_are_trained_plainly(
    model: Model,
    parallel: Parallel,
    optimizer: Optimizer,
    training: Training,
    objective: Objective,
    uptrain: Uptrain | None,
    logging: Logging,
) -> Iterator[Problem]:
    """What does not know a second sequence that is read."""
    if model.encoder is None:
        return
    if parallel.pipeline > 1:
        reason = (
            "gives each stage as many layers, and those of an encoder compute other tokens than its decoder's"
        )
        yield Problem("parallel.pipeline", parallel.pipeline, reason, "set 1")
    if parallel.context > 1:
        reason = "would split sources and targets, which an encoder-decoder pads and reads as a whole"
        yield Problem("parallel.context", parallel.context, reason, "set 1")
    if parallel.tensor > model.kv_heads:
        reason = (
            f"exceeds model.num_kv_heads={model.kv_heads}, and ranks share no key head of cross attention"
        )
        yield Problem("parallel.tensor", parallel.tensor, reason, f"set {model.kv_heads} or a divisor of it")
    if objective.kind == "distill":
        reason = "reads one sequence, and an encoder-decoder has two"
        yield Problem("objective.kind", "distill", reason, "set kind: labels")
    if uptrain is not None:
        reason = "turns dense decoders and encoders into others, and model.kind is encoder_decoder"
        yield Problem("uptrain", "{...}", reason, "remove it; init.from starts from another run's weights")
    if optimizer.updates is not None:
        reason = "has no low-rank updates for cross attention"
        yield Problem("optimizer.trained", "lora", reason, "set all")
    if training.compile != "none":
        reason = "compiles layers of one sequence, and those of a decoder read a second one"
        yield Problem("training.compile", training.compile, reason, "set none")
    if logging.analysis_every is not None:
        reason = "plots the attention of one sequence, and an encoder-decoder has two"
        yield Problem("logging.analysis_every", logging.analysis_every, reason, "remove it")


def _stages_count_tokens_of_one_sequence(data: Data, model: Model) -> Iterator[Problem]:
    if model.sequences_per_sample == 1:
        return
    for number, stage in enumerate(data.stages):
        if stage.from_tokens is not None:
            reason = "is turned into steps by one sequence a sample, and those of this model have two"
            yield Problem(f"data.stages.{number}.from_tokens", stage.from_tokens, reason, "set from_step")


def _data_stages_follow_each_other(data: Data, training: Training) -> Iterator[Problem]:
    before = 0
    for stage, mixture in zip(data.stages, mixtures(data, training)[1:]):
        key = "from_step" if stage.from_tokens is None else "from_tokens"
        name = f"{mixture.key.removesuffix('train')}{key}"
        if mixture.first_step <= before:
            reason = f"is step {mixture.first_step}, which does not come after the stage before it, from step {before}"
            yield Problem(name, getattr(stage, key), reason, "give the stages in their order")
        before = mixture.first_step


def _uptraining_has_one_mixture(data: Data, uptrain: Uptrain | None) -> Iterator[Problem]:
    if uptrain is not None and data.stages:
        reason = "count the steps of one run, and uptrain makes several"
        yield Problem(
            "data.stages", "[...]", reason, "remove them, and start a run from the up-trained model"
        )


def _scored_tokens_suit_the_model(model: Model, data: Data) -> Iterator[Problem]:
    reason = f"has no effect on model.kind: {model.kind}"
    if data.masking is not None and model.kind != "masked_lm":
        yield Problem("data.masking", "{...}", reason, "remove it or take model.kind: masked_lm")
    if data.scored == "answers" and not model.is_causal:
        yield Problem("data.scored", "answers", reason, "set all or take model.kind: causal_lm")


def _teachers_suit_the_model(
    objective: Objective, uptrain: Uptrain | None, model: Model
) -> Iterator[Problem]:
    """Distillation needs a vocabulary; attention transfer compares causal layers."""
    is_transfer = objective.kind == "transfer"
    if model.kind == "classifier":
        reason = "compares probabilities of a vocabulary, and model.kind: classifier has none"
        if objective.kind == "distill":
            yield Problem("objective.kind", objective.kind, reason, "set kind: labels")
        if uptrain is not None and uptrain.distill.kl > 0:
            remedy = "set 0, to train the main stage on the labels"
            yield Problem("uptrain.distill.kl", uptrain.distill.kl, reason, remedy)
    if not model.is_causal:
        reason = f"needs model.kind: causal_lm, and it is {model.kind}"
        if is_transfer:
            yield Problem("objective.kind", objective.kind, reason, "take kind: distill or labels")
        if uptrain is not None and uptrain.transfer is not None:
            yield Problem("uptrain.transfer", "{...}", reason, "set null; the main stage trains all weights")


def _z_loss_has_logits(
    training: Training, objective: Objective, uptrain: Uptrain | None, model: Model
) -> Iterator[Problem]:
    if training.z_loss == 0:
        return
    reasons = {
        "has no effect on a classifier, which has no vocabulary": model.kind == "classifier",
        f"is for objective.kind: labels, and it is {objective.kind}": objective.kind != "labels",
        "is for objective.kind: labels, and uptrain sets that of its stages": uptrain is not None,
    }
    for reason in [reason for reason, holds in reasons.items() if holds][:1]:
        yield Problem("training.z_loss", training.z_loss, reason, "remove it")


FLOAT8_UNIT = 16
"""Sides of the matrices of float8 products are multiples of it."""


def _layers_can_be_compiled(training: Training, parallel: Parallel, model: Model) -> Iterator[Problem]:
    if training.compile == "none":
        return
    if parallel.zero_stage == 3:
        reason = "gathers weights by hooks, which compiled layers leave out"
        yield Problem("parallel.zero_stage", 3, reason, "set at most 2, or training.compile: none")
    if model.dropout.any:
        reason = "has other masks in compiled layers, and the same run would depend on training.compile"
        yield Problem("model.dropout", "{...}", reason, "remove it, or set training.compile: none")


def _layers_can_have_float8_products(
    training: Training, parallel: Parallel, model: Model
) -> Iterator[Problem]:
    if training.fp8 == "none":
        return
    key, fp8 = "training.fp8", training.fp8
    if training.dtype != "bfloat16":
        reason = f"takes the place of products in bfloat16, and training.dtype is {training.dtype}"
        yield Problem(key, fp8, reason, "set training.dtype to bfloat16, or fp8 to none")
    if parallel.zero_stage == 3:
        reason = "gathers weights by hooks of matrices, which float8 products leave out"
        yield Problem("parallel.zero_stage", 3, reason, "set at most 2, or training.fp8: none")
    for name, size in dict.fromkeys(_float8_sides(model, training, parallel)):
        if size % FLOAT8_UNIT:
            reason = f"multiplies matrices whose sides are multiples of {FLOAT8_UNIT} on a rank, and one has {size}"
            yield Problem(key, fp8, reason, f"set none, or another {name}")


def _float8_sides(model: Model, training: Training, parallel: Parallel) -> Iterator[tuple[str, int]]:
    """Keys, and the sides of the matrices of layers that they determine on one rank; gradients are sums over tokens."""
    head, ranks = model.head_size, parallel.tensor
    yield "model.hidden_size", model.hidden_size
    yield "model.ffn_hidden_size", model.ffn_size // ranks
    yield "model.head_dim", model.num_heads * head // ranks
    for attention in model.mechanisms:
        yield "model.head_dim", (attention.keys_per_head + 1) * model.kv_heads * head // ranks
    for phase in training.phases:
        rows = phase.training.micro_batch_size
        yield f"{phase.key}.micro_batch_size", rows * phase.training.seq_len // parallel.context
        if training.mlp_chunk_size is not None:
            yield "training.mlp_chunk_size", rows * training.mlp_chunk_size


def _transfer_has_no_dropout(objective: Objective, model: Model) -> Iterator[Problem]:
    if objective.kind == "transfer" and model.dropout.any:
        reason = "has no effect on attention transfer, which runs the teacher's layers"
        yield Problem("model.dropout", "{...}", reason, "remove it")


def _transfer_excludes_further_inputs(
    objective: Objective, uptrain: Uptrain | None, model: Model
) -> Iterator[Problem]:
    """Attention transfer gives a student layer only its teacher's inputs."""
    if not any(attention.spec.further for attention in model.attentions):
        return
    reason = (
        "trains attention on the dense model's queries, keys and values alone, and a layer has further inputs"
    )
    if uptrain is not None and uptrain.transfer is not None:
        yield Problem("uptrain.transfer", "{...}", reason, "set null; the main stage trains all of the layer")
    if objective.kind == "transfer":
        yield Problem("objective.kind", "transfer", reason, "take kind: distill")


def _adapters_need_lora(init: Init, optimizer: Optimizer, uptrain: Uptrain | None) -> Iterator[Problem]:
    if init.adapter is None:
        return
    if init.source is None or optimizer.updates is None:
        reason = "initializes low-rank updates of loaded weights, and there are none"
        yield Problem("init.adapter", init.adapter, reason, "set init.from and optimizer.trained: lora")
    if uptrain is not None:
        reason = "would initialize every stage of uptrain"
        yield Problem(
            "init.adapter", init.adapter, reason, "export the model with it, and take that as init.from"
        )


def _frozen_weights_are_supported(
    optimizer: Optimizer, model: Model, parallel: Parallel, init: Init
) -> Iterator[Problem]:
    if optimizer.trained == "all":
        return
    if parallel.zero_stage == 3:
        reason = "saves no frozen weights in its checkpoints"
        yield Problem("parallel.zero_stage", 3, reason, "set at most 2 or optimizer.trained: all")
    if optimizer.updates is not None and init.source is None:
        reason = "trains low-rank updates of weights that stay as they were drawn"
        yield Problem(
            "optimizer.trained", "lora", reason, "set init.from to the model to update, or trained: all"
        )
    if optimizer.updates is not None and any(a.compresses_input for a in model.attentions):
        reason = "has no low-rank updates for a layer that compresses its input"
        yield Problem("optimizer.trained", "lora", reason, "set compression.compress: projected")
    if optimizer.updates is not None and "gate" in optimizer.updates.targets and not model.is_mlp_gated:
        reason = f"names a matrix that an MLP with activation: {model.activation} does not have"
        yield Problem("optimizer.lora.targets", optimizer.updates.targets, reason, "leave gate out")
    if optimizer.trained == "mechanism" and all(a.is_bare_exact for a in model.mechanisms):
        reason = "leaves nothing to train: softmax attention has no weights of its own"
        yield Problem("optimizer.trained", optimizer.trained, reason, "set all or another model.attention")


def _muon_has_whole_matrices(
    optimizer: Optimizer,
    parallel: Parallel,
    objective: Objective,
    uptrain: Uptrain | None,
    deepspeed: dict[str, Any],
) -> Iterator[Problem]:
    if optimizer.name != "muon":
        return
    key = "optimizer.name"
    if parallel.zero_stage == 3:
        reason = "updates whole matrices, and parallel.zero_stage=3 partitions every weight over all ranks"
        yield Problem(key, "muon", reason, "set adamw, or zero_stage to at most 2")
    if objective.kind == "transfer" or uptrain is not None:
        what = "attention transfer" if uptrain is None else "a stage of uptrain"
        reason = f"updates whole matrices, and {what} may train none"
        yield Problem(key, "muon", reason, "set adamw")
    zero = deepspeed.get("zero_optimization")
    if isinstance(zero, dict) and (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        reason = "would multiply matrices on the host, where deepspeed.zero_optimization.offload_optimizer has them"
        yield Problem(key, "muon", reason, "set adamw, or remove offload_optimizer")


_DECIDED_HERE = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size and training.micro_batch_size",
    "gradient_clipping": "optimizer.clip_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "bf16": "training.dtype",
    "bfloat16": "training.dtype",
    "fp16": "training.dtype",
    "amp": "training.dtype",
    "torch_autocast": "training.dtype",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_allow_untested_optimizer": "optimizer",
    "steps_per_print": "training.log_every",
    "tensorboard": "logging.tensorboard",
    "sequence_parallel_size": "parallel.context",
    "tensor_parallel": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "data_efficiency": "data",
    "curriculum_learning": "data",
}


def _deepspeed_keys_do_not_conflict(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    for dotted, key in _DECIDED_HERE.items():
        value: Any = deepspeed
        for part in dotted.split("."):
            value = value.get(part, MISSING) if isinstance(value, dict) else MISSING
        if value is not MISSING:
            yield Problem(
                f"deepspeed.{dotted}", value, "is decided by Megakernel", f"remove it and set {key}"
            )


def _deepspeed_has_buckets(deepspeed: dict[str, Any]) -> Iterator[Problem]:
    """Checks the key that `megakernel plan` reads; DeepSpeed checks the rest when it starts."""
    zero = deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        reason = "should be a mapping of keys"
        yield Problem("deepspeed.zero_optimization", zero, reason, "write its keys below it")
    elif not isinstance(size := zero.get("reduce_bucket_size", 1), (int, float)) or not 0 < size < math.inf:
        key = "deepspeed.zero_optimization.reduce_bucket_size"
        yield Problem(key, size, "is not a number of elements", "write one, such as 5e8")


ENCODER_ATTENTION = "model.encoder.attention"


def _named_attentions(model: Model) -> Iterator[tuple[str, Attention]]:
    """(key, attention) of every self-attention that the model configures."""
    if model.encoder is not None:
        yield ENCODER_ATTENTION, model.encoder.attention
    pattern = model.attention_pattern or ["main"]
    if "main" in pattern:
        yield "model.attention", model.attention
    for place, entry in enumerate(pattern):
        if isinstance(entry, Attention):
            yield f"model.attention_pattern.{place}", entry


def stages_share_a_schedule(uptrain: Uptrain | None, schedule: Schedule) -> Iterator[Problem]:
    """`uptrain` itself splits a schedule over its stages."""
    if uptrain is None:
        return
    for key, steps in schedule.part:
        if steps:
            yield Problem(f"schedule.part.{key}", steps, "is set by the stages of uptrain", "remove it")


def stages_are_measured(uptrain: Uptrain | None, training: Training) -> Iterator[Problem]:
    """Up-training compares the dense model and the stages on validation samples."""
    if uptrain is not None and training.eval_samples == 0:
        reason = "leaves nothing to measure the dense model and the stages of uptrain on"
        yield Problem("training.eval_samples", 0, reason, "set more, such as 64")


def stages_fit_the_model(
    uptrain: Uptrain | None, init: Init, model: Model, objective: Objective, training: Training
) -> Iterator[Problem]:
    """`uptrain` needs init.from, existing layers, and sequences that do not shrink."""
    if uptrain is None:
        return
    if init.source is None:
        remedy = "give the folder of a dense model or of a run"
        yield Problem("init.from", None, "is missing beside uptrain", remedy)
    if objective != Objective():
        remedy = "remove it; uptrain.distill sets the loss of the main stage"
        yield Problem("objective.kind", objective.kind, "is set by the stages of uptrain", remedy)
    if model.has_position_parameters and model.max_positions is None:
        reason = (
            "is missing beside uptrain, whose stages share one table of positions, whatever their lengths"
        )
        remedy = "set that of the dense model, or its training.seq_len if it is a run without that key"
        yield Problem("model.max_positions", None, reason, remedy)
    kept = uptrain.layers.keep
    if kept and model.attention_pattern is not None:
        remedy = "remove one of them"
        yield Problem("uptrain.layers.keep", kept, "and model.attention_pattern both choose layers", remedy)
    largest = kept if isinstance(kept, int) else max(kept, default=-1) + 1
    if largest > model.num_layers:
        reason = f"names more layers than model.num_layers={model.num_layers}"
        yield Problem("uptrain.layers.keep", kept, reason, f"count layers from 0 to {model.num_layers - 1}")
    named = [] if isinstance(kept, int) else kept
    others = [layer for index, layer in enumerate(model.attentions) if index not in named]
    everything = kept == model.num_layers or all(layer.is_bare_softmax for layer in others)
    if everything and largest <= model.num_layers:
        remedy = "name a mechanism in model.attention, such as flurka, and keep fewer layers"
        yield Problem("uptrain.layers.keep", kept, "leaves every layer softmax: nothing to up-train", remedy)
    elif uptrain.transfer is not None and all(layer.is_bare_exact for layer in others):
        reason = "trains a mechanism's own weights, and those of model.attention are the dense model's"
        yield Problem("uptrain.transfer", "{...}", reason, "set null; the main stage trains all weights")
    if uptrain.length is not None and uptrain.length.seq_len < training.seq_len:
        reason = f"is shorter than training.seq_len={training.seq_len}"
        yield Problem(
            "uptrain.length.seq_len", uptrain.length.seq_len, reason, f"set at least {training.seq_len}"
        )


def base_stages_fit(uptrain: Uptrain | None, model: Model) -> Iterator[Problem]:
    """A base stage needs FLuRKA, and ranks that are lowered a window of blocks."""
    if uptrain is None or uptrain.alpha == 0:
        return
    alpha, flurka = uptrain.alpha, model.attention
    if not flurka.is_flurka:
        reason = "trains a half of FLuRKA first, and model.attention is not FLuRKA"
        remedy = "set 0 or model.attention: " + ("flurka" if model.is_causal else "flurka_performer")
        yield Problem("uptrain.alpha", alpha, reason, remedy)
    elif flurka.near is None and uptrain.is_set("anneal") and uptrain.anneal:
        reason = "lowers the rank of blocks beside a near window, and model.attention has none"
        yield Problem("uptrain.anneal", uptrain.anneal, reason, "remove it")
    elif flurka.near is not None and alpha + uptrain.annealed >= 1:
        reason = f"and anneal={uptrain.anneal:g} leave nothing of training.steps to the configured model"
        yield Problem("uptrain.alpha", alpha, reason, "set shares that add up to less than 1")


def transfer_blocks_fit(uptrain: Uptrain | None, model: Model, parallel: Parallel) -> Iterator[Problem]:
    """Blocks of attention transfer fit the model, and no pipeline splits it."""
    if uptrain is None or uptrain.transfer is None or (count := uptrain.transfer.block_layers) is None:
        return
    key = "uptrain.transfer.block_layers"
    if count > model.num_layers:
        reason = f"exceeds model.num_layers={model.num_layers}"
        yield Problem(key, count, reason, f"set at most {model.num_layers}, or null")
    if parallel.pipeline > 1:
        reason = (
            f"takes one block after the other, and parallel.pipeline={parallel.pipeline} holds all at once"
        )
        yield Problem(key, count, reason, "set null, or parallel.pipeline: 1")


def near_windows_have_gates(uptrain: Uptrain | None, model: Model) -> Iterator[Problem]:
    """Near dropout needs gates."""
    if uptrain is not None and uptrain.near_dropout and not model.is_gated:
        remedy = "set 0, or near: {kind: softmax, join: gated} of model.attention"
        yield Problem(
            "uptrain.near_dropout", uptrain.near_dropout, "needs gates, and the model has none", remedy
        )
