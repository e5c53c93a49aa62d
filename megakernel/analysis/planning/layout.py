"""One way to cut a configured run over devices, and what follows from it for one of them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megakernel.config import Attention, Config, Model
from megakernel.parallel.exchange_way import parts, way

from .stages import stage_layers, stage_parameters

Recompute = Literal["none", "selective", "full"]
Exchange = Literal["own", "ring"]
"""How shards of a row meet in softmax layers: as the code does it, by heads, or (for comparison) by a ring of keys."""


@dataclass(frozen=True)
class Stack:
    """What runs beneath the model, as far as it decides what is kept in memory."""

    on_gpu: bool = True
    """torch computes norms in one fused operation there, and kernels keep their outputs."""


GPU, CPU = Stack(on_gpu=True), Stack(on_gpu=False)


@dataclass(frozen=True)
class Layout:
    """How many devices share what, and what a device does at once."""

    tensor: int
    sequence_parallel: bool
    context: int
    data: int
    pipeline: int
    zero_stage: int
    micro_batch_size: int
    recompute: Recompute

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def gradient(self) -> int:
        """Devices over which gradients are summed and ZeRO shards: data x context."""
        return self.data * self.context

    def __str__(self) -> str:
        tensor = f"tp {self.tensor}{'+sp' if self.sequence_parallel else ''}"
        cut = f"{tensor}, cp {self.context}, dp {self.data}, pp {self.pipeline}, ZeRO {self.zero_stage}"
        return f"{cut}, micro batch {self.micro_batch_size}, recompute {self.recompute}"

    def keys(self) -> dict[str, object]:
        """The configuration that takes this layout, by key."""
        return {
            "parallel.tensor": self.tensor,
            "parallel.sequence_parallel": self.sequence_parallel,
            "parallel.context": self.context,
            "parallel.pipeline": self.pipeline,
            "parallel.zero_stage": self.zero_stage,
            "training.micro_batch_size": self.micro_batch_size,
            "training.activation_checkpointing": self.recompute,
        }


@dataclass(frozen=True, eq=False)
class Job:
    """A configured run on one layout."""

    config: Config
    vocab_size: int
    """Ids of the tokenizer, or what stands for them; rows of the embedding follow from it."""

    layout: Layout
    stack: Stack = GPU
    exchange: Exchange = field(default="own")

    @property
    def model(self) -> Model:
        """The configured model."""
        return self.config.model

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.config.training.seq_len

    def passes_keys_round(self, attention: Attention) -> bool:
        """Whether keys and values go round the context ranks rather than tokens being traded for heads."""
        if self.exchange == "ring":
            return True
        wanted = self.config.parallel.softmax_exchange
        divides = self.heads % self.layout.context == 0
        return attention.is_full_softmax and (wanted == "ring" or (wanted == "auto" and not divides))

    def state_parts(self, state_bytes: float) -> int | None:
        """Parts in which a kernel state of so many bytes is passed on over the context ranks; None: it is gathered."""
        wanted, ranks = self.config.parallel.state_exchange, self.layout.context
        chosen = way(ranks, round(state_bytes)) if wanted == "auto" else wanted
        return parts(ranks, round(state_bytes)) if chosen == "ring" else None

    @property
    def rows(self) -> int:
        """Rows of one micro-batch."""
        return self.layout.micro_batch_size * self.model.rows_per_sample

    @property
    def cp_shard(self) -> int:
        """Tokens of a row that one device holds."""
        return self.seq_len // self.layout.context

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.rows * self.cp_shard

    @property
    def sharded_tokens(self) -> float:
        """Those of them whose residuals and norms the device holds."""
        return self.tokens / (self.layout.tensor if self.layout.sequence_parallel else 1)

    @property
    def tokens_per_step(self) -> int:
        """Of all devices together."""
        return self.config.training.global_batch_size * self.model.rows_per_sample * self.seq_len

    @property
    def micro_batches(self) -> int:
        """Forward passes of one device per step."""
        unit = self.layout.micro_batch_size * self.layout.data
        return self.config.training.global_batch_size // unit

    @property
    def element(self) -> int:
        """Bytes of a number that layers compute with."""
        return 2 if self.config.training.dtype == "bfloat16" else 4

    @property
    def heads(self) -> int:
        """Query heads of one device."""
        return self.model.num_heads // self.layout.tensor

    @property
    def kv_heads(self) -> int:
        """Key heads of one device."""
        return self.model.kv_heads // self.layout.tensor

    @property
    def isolates(self) -> bool:
        """Whether attention follows documents inside a row."""
        return self.config.data.isolate_documents and self.model.classifier is None

    @cached_property
    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [self.model.layer_attention(layer) for layer in range(self.model.num_layers)]

    @cached_property
    def stages(self) -> list[range]:
        """Transformer layers of each pipeline stage, as DeepSpeed cuts them."""
        return stage_layers(self.model, self.layout.pipeline)

    def layers(self, stage: int) -> list[tuple[Attention, int]]:
        """The different attentions of a stage's layers, and how many layers have each."""
        counts: dict[int, int] = {}
        for index in self.stages[stage]:
            place = id(self.attentions[index])
            counts[place] = counts.get(place, 0) + 1
        forms = {id(attention): attention for attention in self.attentions}
        return [(forms[place], count) for place, count in counts.items()]

    @cached_property
    def different_stages(self) -> list[int]:
        """The stages without those that are like an earlier one, which holds more micro-batches and is as slow."""
        found: dict[tuple, int] = {}
        for stage in range(self.layout.pipeline):
            layers = tuple((id(attention), count) for attention, count in self.layers(stage))
            found.setdefault((stage == 0, stage == self.layout.pipeline - 1, layers), stage)
        return list(found.values())

    @cached_property
    def parameters(self) -> list[int]:
        """Trained numbers that one device of each stage holds."""
        layout = self.layout
        return stage_parameters(self.model, self.vocab_size, self.seq_len, layout.tensor, layout.pipeline)
