"""`MegakernelForCausalLM`: the exported model with this package's mechanisms, on a GPU with their kernels."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from megakernel import attention
from megakernel.attention import AttentionInputs
from megakernel.attention.map_parameters import HiddenLayer
from megakernel.attention.mixture import KeyMixture
from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.dense.own import has_decay_and_strength, own_parts
from megakernel.checkpoint.modeling import added_positions, decoder, short_convolution  # noqa: F401
from megakernel.checkpoint.pretrained_config import MegakernelConfig
from megakernel.checkpoint.whole_tensors import WEIGHT
from megakernel.ops.documents import collapse_positions


class PackageAttention(decoder.SelfAttention):
    """Self-attention with a mechanism of this package."""

    def mechanism(self, config: Any, index: int) -> Any:
        """The layer's mechanism."""
        section, self.index = config.section, index
        options, rope = section.layer_attention(index), section.layer_rope(index)
        self.kv_heads, self.keys_per_head = section.kv_heads, options.keys_per_head
        self.rotary = None if rope is None else attention.Rotary(section.rotary_size, *rope)
        dtype = torch.get_default_dtype()
        try:  # buffers stay in float32, and parameters are cast as DeepSpeed casts them
            torch.set_default_dtype(torch.float32)
            core: Any = attention.build(
                options,
                num_heads=section.num_heads,
                num_kv_heads=section.kv_heads,
                head_dim=section.head_size,
                max_positions=section.max_positions,
                seed=(0, index),
                rotary=rope is not None,
            )
        finally:
            torch.set_default_dtype(dtype)
        for parameter in core.parameters():
            parameter.data = parameter.data.to(dtype)
        self.lacks_values = any(x.is_meta for x in core.state_dict().values())
        core.key_heads = options.keys_per_head * section.kv_heads
        core.has_decay, core.has_strength = has_decay_and_strength(options)
        return core

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        state: Any,
        decay: Tensor | None,
        strength: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """See `decoder.SelfAttention`."""
        if self.keys_per_head > 1:
            k = k.unflatten(1, (self.kv_heads, self.keys_per_head))
        logits = [x for x in (decay, strength) if x is not None]
        inputs = AttentionInputs(
            collapse_positions(positions),
            rotary=self.rotary,
            further=torch.stack(logits, -1) if logits else None,
            state=state,
        )
        result: tuple[Tensor, Any] = self.core.attend(q, k, v, inputs)
        return result


class DecoderLayer(decoder.DecoderLayer):
    """A layer with a mechanism of this package."""

    attention_class = PackageAttention


class _Loading(decoder.MegakernelPreTrainedModel):
    """What the model with and without a head share."""

    config_class = MegakernelConfig
    _auto_class: ClassVar[str | None] = None

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: otherwise `transformers` would copy this file next to every saved model."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a saved model; one of an earlier version has other names, and its own code, which does not run."""
        of_hub = {
            key: kwargs[key]
            for key in ("revision", "token", "cache_dir", "local_files_only")
            if key in kwargs
        }
        if name is None or "model" not in PreTrainedConfig.get_config_dict(name, **of_hub)[0]:
            return super().from_pretrained(name, *args, **kwargs)
        folder = Path(name)
        if not folder.is_dir():
            folder = Path(snapshot_download(str(name), **of_hub))
        checkpoint = DenseCheckpoint(folder)
        state: dict[str, Tensor] = {}
        for ours, part in own_parts(checkpoint.names, checkpoint.model).items():
            state |= zip(part.hf_names, part.split(checkpoint.read(ours)[WEIGHT]))
        kwargs.setdefault("config", MegakernelConfig.from_pretrained(folder))
        return super().from_pretrained(None, *args, state_dict=state, **kwargs)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Also of mechanisms, whose values are those of their constructors; loading calls these on the meta device."""
        for module in self.modules():
            if isinstance(module, PackageAttention) and module.lacks_values:
                state = module.core.state_dict(keep_vars=True)
                if not all(getattr(x, "_is_hf_initialized", False) for x in state.values()):
                    values = module.mechanism(self.config, module.index).state_dict()
                    for name, x in state.items():
                        init.copy_(x, values[name])
        super().initialize_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Also reset buffers that files do not hold, sums over a training step."""
        if isinstance(module, HiddenLayer):
            module.begin_step()
        elif isinstance(module, KeyMixture) and module.soft and module.m_step:
            module.counted.zero_()
        else:
            super()._init_weights(module)


class MegakernelModel(_Loading, decoder.MegakernelModel):
    """The decoder without its head."""

    layer_class = DecoderLayer


class MegakernelForCausalLM(_Loading, decoder.MegakernelForCausalLM):
    """The decoder with its head."""

    base_class = MegakernelModel
