"""One way to cut a configured run over devices, and what follows from it for one of them."""

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from megakernel.config import Attention, Config, Model
from megakernel.config.training import Recompute

if TYPE_CHECKING:
    from .measured import Measure, Measured, Part

KeyExchange = Literal["own", "ring"]
"""How shards of a sequence meet under softmax: as the code does it, by heads, or (for comparison) by ring attention."""


GPU, CPU = True, False
"""Our kernels and Liger-Kernel's run there, elsewhere chunked implementations."""


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
    on_gpu: bool = GPU
    exchange: KeyExchange = "own"

    @property
    def model(self) -> Model:
        """The configured model."""
        return self.config.model

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.config.training.seq_len

    def passes_keys_round(self, attention: Attention) -> bool:
        """Whether keys and values go round the context ranks rather than tokens being traded for heads."""
        if self.exchange == "ring":
            return True
        wanted = self.config.parallel.softmax_exchange
        divides = self.heads % self.layout.context == 0
        return attention.passes_keys_round and (wanted == "ring" or (wanted == "auto" and not divides))

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
        """Those of them whose residuals and norms the device holds."""
        return self.tokens / (self.layout.tensor if self.layout.sequence_parallel else 1)

    @property
    def tokens_per_step(self) -> int:
        """Of all devices together."""
        return self.config.training.global_batch_size * self.model.sequences_per_sample * self.seq_len

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

    @cached_property
    def stages(self) -> list[range]:
        """Transformer layers of each pipeline stage, as DeepSpeed cuts them."""
        return stage_layers(self.model.first_layer, self.model.num_layers, self.layout.pipeline)

    def layers(self, stage: int) -> list[tuple[int, int]]:
        """The first of each kind of layers of a stage, and how many layers are like it."""
        return list(Counter(self._first_alike[index] for index in self.stages[stage]).items())

    @cached_property
    def _first_alike(self) -> list[int]:
        """For each layer."""
        known: dict[int, int] = {}
        return [known.setdefault(id(one), index) for index, one in enumerate(self.model.attentions)]

    def parts(self, stage: int) -> list[tuple["Part", int]]:
        """What a stage holds, and how often: embedding, kinds of layers, head."""
        first: list[tuple[Part, int]] = [("first", 1)] if stage == 0 else []
        last: list[tuple[Part, int]] = [("last", 1)] if stage == self.layout.pipeline - 1 else []
        return [*first, *self.layers(stage), *last]

    def measured(self, part: "Part", recompute: Recompute | None = None) -> "Measured":
        """What a part takes for one micro-batch of this layout; recompute: None takes the layout's."""
        measure, layout = self._measure, self.layout
        from .measured import Shape  # not before the libraries were told of their device

        is_layer = isinstance(part, int)
        ring = (
            isinstance(part, int)
            and layout.context > 1
            and self.passes_keys_round(self.model.layer_attention(part))
        )
        # Embedding and head take every token by itself; a classifier's head its sequences.
        alike = not is_layer and self.model.classifier is None
        shape = Shape(
            sequences=1 if alike else self.sequences,
            tokens=self.tokens if alike else self.cp_shard,
            tensor=layout.tensor,
            sequence_parallel=layout.sequence_parallel,
            context=layout.context if is_layer else 1,
            recompute=(recompute or layout.recompute) if is_layer else "none",
            softmax_exchange="ring" if ring else "auto",
            on_gpu=self.on_gpu,
        )
        return measure.of(part, shape)

    @cached_property
    def _measure(self) -> "Measure":
        from megakernel.parallel import prepare_device

        prepare_device("cpu", 0)  # before the libraries are imported that need to be told
        from .measured import measure_of

        return measure_of(self.config, self.vocab_size)

    @cached_property
    def different_stages(self) -> list[int]:
        """The stages without those that are like an earlier one, which holds more micro-batches and is as slow."""
        found: dict[tuple, int] = {}
        for stage in range(self.layout.pipeline):
            found.setdefault(tuple(self.parts(stage)), stage)
        return list(found.values())

    @cached_property
    def parameters(self) -> list[int]:
        """Trained numbers that one device of each stage holds."""
        measure, layout = self._measure, self.layout
        tied = layout.pipeline == 1 and self.holds_second_embedding
        held = []
        for stage in range(layout.pipeline):
            counts = (
                measure.parameters(part, layout.tensor, layout.sequence_parallel) * count
                for part, count in self.parts(stage)
            )
            held.append(sum(counts))
        return [held[0] - self.embedding] if tied else held

    @property
    def holds_second_embedding(self) -> bool:
        """Whether the last stage keeps a copy of the first one's matrix, as its head."""
        return self.model.tie_embeddings and self.model.classifier is None

    @property
    def embedding(self) -> int:
        """Numbers of the embedding that one tensor rank holds."""
        model = self.model
        sequences = model.padded_vocab_size(self.vocab_size + model.special_ids)
        return sequences // self.layout.tensor * model.hidden_size


@cache
def stage_layers(before: int, layers: int, stages: int) -> list[range]:
    """The layers of each stage: those that DeepSpeed's `type:TransformerLayer` gives it, behind others `before`."""
    from megakernel.parallel import prepare_device

    prepare_device("cpu", 0)  # DeepSpeed, not told of its device, prints to stdout what it takes
    from deepspeed.runtime.utils import partition_balanced

    weights = [0] * before + [1] * layers + [0, 0]
    bounds = [0, len(weights)] if stages == 1 else partition_balanced(weights, stages)
    inside = [min(max(int(bound) - before, 0), layers) for bound in bounds]
    return [range(first, end) for first, end in pairwise(inside)]
