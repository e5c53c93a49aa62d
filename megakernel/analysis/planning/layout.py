"""One layout of a configured run, and the share of one device in it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from megakernel.config import Attention, Config, Model, data_parallel_size
from megakernel.config.parallel import SoftmaxExchange
from megakernel.config.training import Recompute
from megakernel.parallel.exchange_method import shards_per_machine

if TYPE_CHECKING:
    from .part_costs import CostMeter, Part, PartCosts, WeightCounts

EXCHANGE_KEYS = {"state_exchange", "softmax_exchange"}
"""Keys of `parallel` that are refused without context ranks."""

GPU, CPU = True, False
"""Values of `PlannedJob.on_gpu`: on a GPU our kernels and Liger-Kernel's run, on a CPU chunked implementations."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallelisms, micro-batch size and recomputation."""

    tensor: int
    sequence_parallel: bool
    context: int
    data: int
    pipeline: int
    zero_stage: int
    micro_batch_size: int
    recompute: Recompute

    @staticmethod
    def of(config: Config, devices: int) -> "Layout":
        """The configured layout on `devices` GPUs; ConfigError if there is none."""
        parallel, training = config.parallel, config.training
        return Layout(
            parallel.tensor,
            parallel.sequence_parallel,
            parallel.context,
            data_parallel_size(config, devices),
            parallel.pipeline,
            parallel.zero_stage,
            training.micro_batch_size,
            training.activation_checkpointing,
        )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def gradient(self) -> int:
        """Size of the group that reduces gradients and shards ZeRO's states: data x context."""
        return self.data * self.context

    @property
    def parts(self) -> dict[str, str]:
        """Name -> size, in the order in which layouts are named."""
        return {
            "tp": f"{self.tensor}{'+sp' if self.sequence_parallel else ''}",
            "cp": str(self.context),
            "dp": str(self.data),
            "pp": str(self.pipeline),
            "ZeRO": str(self.zero_stage),
            "micro batch": str(self.micro_batch_size),
            "recompute": self.recompute,
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in self.parts.items())

    def keys(self) -> dict[str, object]:
        """Configuration key -> value of this layout; keys without effect in it get their defaults."""
        keys: dict[str, object] = {
            "parallel.tensor": self.tensor,
            "parallel.sequence_parallel": self.sequence_parallel,
            "parallel.context": self.context,
            "parallel.pipeline": self.pipeline,
            "parallel.zero_stage": self.zero_stage,
            "training.micro_batch_size": self.micro_batch_size,
            "training.activation_checkpointing": self.recompute,
        }
        if self.context == 1:
            keys |= {f"parallel.{key}": "auto" for key in EXCHANGE_KEYS}
        if self.recompute != "full":
            keys["training.checkpoint_offload"] = False
        return keys


@dataclass(frozen=True, eq=False)
class PlannedJob:
    """A configured run on one layout."""

    config: Config
    vocab_size: int
    """Ids of the tokenizer, or an assumed number; the embedding's rows follow from it."""

    layout: Layout
    on_gpu: bool = GPU
    per_machine: int = 1
    """Devices of one machine."""

    @property
    def model(self) -> Model:
        """The configured model."""
        return self.config.model

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.config.training.seq_len

    def uses_ring(self, attention: Attention) -> bool:
        """Whether attention between context ranks is ring attention instead of Ulysses."""
        wanted = self.config.parallel.softmax_exchange
        if wanted == "auto" and attention.reads_neighbor(self.cp_shard):
            return False
        divides = self.heads % self.layout.context == 0
        return attention.supports_ring_attention and (wanted == "ring" or (wanted == "auto" and not divides))

    @property
    def sequences(self) -> int:
        """Sequences of one micro-batch."""
        return self.layout.micro_batch_size * self.model.sequences_per_sample

    @property
    def cp_shard(self) -> int:
        """Tokens of a sequence that one device holds."""
        return self.seq_len // self.layout.context

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.sequences * self.cp_shard

    @property
    def sharded_tokens(self) -> float:
        """Tokens of a micro-batch whose residuals and norms one device holds."""
        return self.tokens / (self.layout.tensor if self.layout.sequence_parallel else 1)

    @property
    def micro_batches(self) -> int:
        """Forward passes of one device per step."""
        unit = self.layout.micro_batch_size * self.layout.data
        return self.config.training.global_batch_size // unit

    @property
    def idle(self) -> float:
        """The share of a step in which a pipeline stage waits because the pipeline fills and drains."""
        others = self.layout.pipeline - 1
        return others / (self.micro_batches + others)

    @property
    def element(self) -> int:
        """Bytes of a number that layers compute with."""
        return 2 if self.config.training.dtype == "bfloat16" else 4

    @property
    def heads(self) -> int:
        """Query heads of one device."""
        return self.model.num_heads // self.layout.tensor

    @cached_property
    def stages(self) -> list[range]:
        """Transformer layers of each pipeline stage, as DeepSpeed partitions them."""
        return stage_layers(self.model.first_layer, self.model.num_layers, self.layout.pipeline)

    def layers(self, stage: int) -> list[tuple[int, int]]:
        """(first layer, number of layers) of each kind of layers in a stage."""
        return list(Counter(self._first_alike[index] for index in self.stages[stage]).items())

    @cached_property
    def _first_alike(self) -> list[int]:
        """For each layer, the first layer with the same attention."""
        known: dict[int, int] = {}
        return [known.setdefault(id(x), index) for index, x in enumerate(self.model.attentions)]

    def parts(self, stage: int) -> list[tuple["Part", int]]:
        """The parts of a stage with their counts: embedding, kinds of layers, head."""
        first: list[tuple[Part, int]] = [("first", 1)] if stage == 0 else []
        last: list[tuple[Part, int]] = [("last", 1)] if stage == self.layout.pipeline - 1 else []
        return [*first, *self.layers(stage), *last]

    def costs(self, part: "Part") -> "PartCosts":
        """Measure a part for one micro-batch of this layout."""
        meter, layout = self._meter, self.layout
        from .part_costs import PartShape  # after `_meter` has set the device, which libraries read on import

        is_layer = isinstance(part, int)
        exchange: SoftmaxExchange = "auto"
        if isinstance(part, int) and layout.context > 1:
            attention = self.model.layer_attention(part)
            if attention.selection is not None or self.uses_ring(attention):
                exchange = "ring"
            elif self.config.parallel.softmax_exchange == "heads":
                exchange = "heads"
        # Embedding and head treat every token separately; a classifier's head treats sequences.
        by_token = not is_layer and self.model.classifier is None
        shape = PartShape(
            sequences=1 if by_token else self.sequences,
            tokens=self.tokens if by_token else self.cp_shard,
            tensor=layout.tensor,
            sequence_parallel=layout.sequence_parallel,
            context=layout.context if is_layer else 1,
            recompute=layout.recompute if is_layer else "none",
            softmax_exchange=exchange,
            on_gpu=self.on_gpu,
            shards_per_machine=shards_per_machine(
                range(0, layout.context * layout.tensor, layout.tensor), self.per_machine
            ),
        )
        return meter.costs(part, shape)

    @cached_property
    def _meter(self) -> "CostMeter":
        from megakernel.parallel import prepare_device

        prepare_device("cpu", 0)  # before importing libraries that read the device on import
        from .part_costs import meter_of

        return meter_of(self.config, self.vocab_size)

    @cached_property
    def distinct_stages(self) -> list[int]:
        """Stages with distinct parts; of equal ones the first, which holds more micro-batches and is as slow."""
        first_stages: dict[tuple, int] = {}
        for stage in range(self.layout.pipeline):
            first_stages.setdefault(tuple(self.parts(stage)), stage)
        return list(first_stages.values())

    @cached_property
    def parameters(self) -> list[int]:
        """Parameters per device of each stage."""
        return self._per_stage(lambda weights: weights.all, lambda weights: weights.shared)

    @cached_property
    def trained(self) -> list[int]:
        """Trained parameters per device of each stage."""
        return self._per_stage(lambda weights: weights.trained, lambda weights: weights.shared_trained)

    def matrices(self, stage: int) -> list[int]:
        """Parameters per device of each of a stage's matrices that Muon trains, in the optimizer's order."""
        if self.config.optimizer.name != "muon":
            return []
        return [
            size for index in self.stages[stage] for size in self._weights(self._first_alike[index]).matrices
        ]

    def largest_layer(self, stage: int) -> int:
        """Parameters per device of a stage's largest layer, which may be the embedding or the head."""
        return max(self._weights(part).all for part, _ in self.parts(stage))

    def _weights(self, part: "Part") -> "WeightCounts":
        return self._meter.parameters(part, self.layout.tensor, self.layout.sequence_parallel)

    def _per_stage(
        self, counted: Callable[["WeightCounts"], int], shared: Callable[["WeightCounts"], int]
    ) -> list[int]:
        """counted: of a part with weights of its own; shared: of it, what only the first layer has."""
        layout = self.layout

        def count(part: "Part") -> int:
            return counted(self._weights(part))

        held = [sum(count(part) * times for part, times in self.parts(n)) for n in range(layout.pipeline)]
        if layout.pipeline == 1 and self.ties_embedding and count("first"):
            held[0] -= self.embedding
        for compression in {attention.compression for attention in self.model.attentions}:
            if getattr(compression, "share_layers", False):  # which no pipeline splits
                alike = [n for n, x in enumerate(self.model.attentions) if x.compression == compression]
                held[0] -= (len(alike) - 1) * shared(self._weights(self._first_alike[alike[0]]))
        return held

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding is trained."""
        return self._weights("first").trained > 0

    @property
    def ties_embedding(self) -> bool:
        """Whether the head is tied to the embedding, so that the last of several stages has a copy of its matrix."""
        return self.model.tie_embeddings and self.model.classifier is None

    @property
    def embedding(self) -> int:
        """Parameters of the embedding on one tensor rank."""
        model = self.model
        padded_vocab_size = model.padded_vocab_size(self.vocab_size + model.special_ids)
        return padded_vocab_size // self.layout.tensor * model.hidden_size


@cache
def stage_layers(before: int, layers: int, stages: int) -> list[range]:
    """The transformer layers of each stage by DeepSpeed's `type:TransformerLayer`; before: layers in front of them."""
    from megakernel.parallel import prepare_device

    prepare_device("cpu", 0)  # otherwise DeepSpeed prints its choice of device to stdout
    from deepspeed.runtime.utils import partition_balanced

    weights = [0] * before + [1] * layers + [0, 0]
    bounds = [0, len(weights)] if stages == 1 else partition_balanced(weights, stages)
    inside = [min(max(int(bound) - before, 0), layers) for bound in bounds]
    return [range(first, end) for first, end in pairwise(inside)]
