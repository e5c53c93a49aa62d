"""The decoder: attention and MLP layers, the base model, and the causal language model."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .cache import StateCache, next_positions
from .configuration import MegakernelConfig
from .layers import MLP, OPTIONAL, Attention, RMSNorm, Rotary, layer_norm

READ = 2048  # tokens that all layers read at once without gradients, which bounds the memory of a long prompt

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that say of packed texts what position_ids say, too."""


class SelfAttention(nn.Module):
    """Projections to heads, the layer's mechanism, and the projection back."""

    def __init__(self, config: MegakernelConfig, index: int):
        super().__init__()
        options, hidden, self.head_dim = config.layer_attention(index), config.hidden_size, config.head_dim
        self.core: Any = self.mechanism(config, index)
        kv_heads = config.num_key_value_heads
        heads = (config.num_attention_heads, self.core.key_heads, kv_heads)
        widths = [count * self.head_dim for count in heads]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, n, bias=config.qkv_bias) for n in widths)
        self.o_proj = nn.Linear(widths[0], hidden, bias=config.bias)
        self.q_norm = self.k_norm = self.o_norm = self.g_proj = None
        self.q_conv1d = self.k_conv1d = self.v_conv1d = None
        if config.qk_norm:
            normed = widths[:2] if config.qk_norm_width == "all" else [self.head_dim] * 2
            self.q_norm, self.k_norm = (RMSNorm(config, n) for n in normed)
        if (width := options.get("short_convolution")) is not None:
            convolutions = (OPTIONAL["short_convolution"](n, width) for n in widths)
            self.q_conv1d, self.k_conv1d, self.v_conv1d = convolutions
        self.a_proj = nn.Linear(hidden, kv_heads, bias=False) if self.core.has_decay else None
        self.b_proj = nn.Linear(hidden, kv_heads, bias=False) if self.core.has_strength else None
        if options["output_norm"]:
            self.o_norm = RMSNorm(config, self.head_dim)
        if (gate := options.get("output_gate")) is not None:
            self.gate_act = F.silu if gate == "silu" else torch.sigmoid
            self.g_proj = nn.Linear(hidden, widths[0], bias=False)
        multiplier = config.attention_multiplier
        self.query_scale = 1.0 if multiplier is None else multiplier * self.head_dim**0.5

    def forward(self, x: Tensor, positions: Tensor, state: Any) -> tuple[Tensor, Any]:
        """x (B, N, C), positions (B, N) and the state before -> (B, N, C) and the state after."""
        core_state, *filters = [None] * 4 if state is None else state
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        for place, norm in enumerate((self.q_norm, self.k_norm)):
            if norm is not None:
                parts[place] = norm(parts[place].unflatten(-1, (-1, len(norm.weight)))).flatten(-2)
        for place, convolution in enumerate((self.q_conv1d, self.k_conv1d, self.v_conv1d)):
            if convolution is not None:
                parts[place], filters[place] = convolution(parts[place], positions, filters[place])
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        q = q if self.query_scale == 1 else q * self.query_scale
        logits = [None if linear is None else linear(x).mT for linear in (self.a_proj, self.b_proj)]
        heads, core_state = self.attend(q, k, v, positions, core_state, *logits)
        if self.o_norm is not None:
            heads = self.o_norm(heads)
        heads = heads.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            heads = heads * self.gate_act(self.g_proj(x))
        return self.o_proj(heads), (core_state, *filters)

    def mechanism(self, config: MegakernelConfig, index: int) -> Any:
        """The layer's mechanism."""
        options, rotary = config.layer_attention(index), config.layer_rotary(index)
        if (kind := options["kind"]) not in Attention.kinds:
            raise ValueError(
                f"config.json has attention of kind {kind!r}, which this file lacks; export it again"
            )
        return Attention.kinds[kind](config, options, None if rotary is None else Rotary(config, *rotary))

    def attend(self, *inputs: Any) -> tuple[Tensor, Any]:
        """The mechanism's output and state, without autocast, because a state is a sum over many tokens."""
        with torch.autocast(inputs[0].device.type, enabled=False):
            return self.core(*inputs)


class DecoderLayer(GradientCheckpointingLayer):
    """y = x + attention(norm(x)), then y + mlp(norm(y)); with parallel_residual y + mlp(norm(x))."""

    attention_class: ClassVar[type[SelfAttention]] = SelfAttention

    def __init__(self, config: MegakernelConfig, index: int):
        super().__init__()
        self.parallel, self.normalized = config.parallel_residual, config.normalized_residual
        self.multiplier = config.residual_multiplier
        before, after = (config.norm_placement in (place, "both") for place in ("before", "after"))
        self.input_layernorm = layer_norm(config, before)
        self.self_attn = self.attention_class(config, index)
        self.post_attention_layernorm = layer_norm(config, after)
        self.pre_feedforward_layernorm = layer_norm(config, before)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = layer_norm(config, after)

    def forward(self, x: Tensor, positions: Tensor, state: Any) -> tuple[Tensor, Any]:
        """x (B, N, C), positions (B, N) and the state before -> (B, N, C) and the state after."""
        normed = self.input_layernorm(x)
        attended, state = self.self_attn(normed, positions, state)
        y = normed if self.normalized else x
        y = y + self.multiplier * self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(x if self.parallel else y))
        return y + self.multiplier * self.post_feedforward_layernorm(inner), state


class MegakernelPreTrainedModel(PreTrainedModel):
    """What the base model and the language model share."""

    config: MegakernelConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_sdpa = True
    _is_stateful = True  # disables assisted decoding: a state cannot forget rejected tokens

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Give a module's own parameters, and random features, their initial values."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.embedding_initializer_range or std)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


class MegakernelModel(MegakernelPreTrainedModel):
    """The decoder without its head."""

    _auto_class: ClassVar[str | None] = "AutoModel"
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: MegakernelConfig):
        super().__init__(config)
        if not config.attention:
            raise ValueError("config.json has no `attention`; export the run again with `megakernel export`")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        added = config.position in ("learned", "sinusoidal")
        self.embed_positions = OPTIONAL[config.position](config) if added else None
        layers = (self.layer_class(config, index) for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = layer_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of tokens that follow those in the cache, which changes in place.

        attention_mask: (B, N), or longer by the tokens in the cache: 1 for text, 0 for padding before or after it.
        position_ids: (B, N) or (1, N), positions in documents, each of which starts at 0; by default documents start
        at the first token, after padding and, if training isolated them, after eos_token_id (not known from
        inputs_embeds). use_cache: by default as in the configuration, and not in training.
        """
        kwargs["output_attentions"] = output_attentions or self.config.output_attentions
        packing = () if position_ids is None else PACKING
        for name, value in kwargs.items():
            if value is not None and value is not False and name not in packing:
                raise ValueError(f"{name}={value!r} has no meaning for this model; leave it out")
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise ValueError("token_type_ids names a second kind of token; leave it out")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        use_cache = use_cache and not (self.gradient_checkpointing and self.training)
        all_inputs = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        cache = past_key_values if past_key_values is not None else StateCache()
        if not isinstance(cache, StateCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}; leave it out")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        ends = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        if input_ids is not None and self.config.isolate_documents and self.config.eos_token_id is not None:
            ends = input_ids == self.config.eos_token_id
        positions, places = next_positions(ends, attention_mask, cache.places, position_ids)
        states: list[Any] = cache.states or [None] * len(self.layers)
        size = embeds.shape[1] if torch.is_grad_enabled() else READ
        outputs: list[list[Tensor]] = []
        for chunk, at in zip(embeds.split(size, 1), positions.split(size, 1)):
            hidden, states = self.read(chunk, at, states, all_inputs)
            outputs.append(hidden)
        # Of one chunk they are no copies, so that gradients reach them.
        out = [torch.cat(parts, 1) if len(parts) > 1 else parts[0] for parts in zip(*outputs)]
        if use_cache:
            cache.states, cache.places, cache.tokens = states, places, cache.tokens + embeds.shape[1]
        return BaseModelOutputWithPast(
            out[-1], cache if use_cache else None, tuple(out) if all_inputs else None
        )

    def read(
        self, hidden: Tensor, positions: Tensor, states: list[Any], all_inputs: bool
    ) -> tuple[list[Tensor], list[Any]]:
        """The output for embeddings (B, N, C), after the inputs of all layers if asked for, and the layers' states."""
        if self.config.embedding_multiplier != 1:
            # The multiplier is first rounded to the dtype, as in Gemma's training.
            hidden = hidden * torch.tensor(self.config.embedding_multiplier, dtype=hidden.dtype).item()
        if self.embed_positions is not None:
            hidden = self.embed_positions(hidden, positions)
        inputs, after = [], []
        for layer, before in zip(self.layers, states):
            if all_inputs:
                inputs.append(hidden)
            hidden, state = layer(hidden, positions, before)
            after.append(state)
        return [*inputs, self.norm(hidden)], after


class MegakernelForCausalLM(MegakernelPreTrainedModel, GenerationMixin):
    """The decoder with its head."""

    _auto_class: ClassVar[str | None] = "AutoModelForCausalLM"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    base_class: ClassVar[type[MegakernelModel]] = MegakernelModel

    def __init__(self, config: MegakernelConfig):
        super().__init__(config)
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Next-token logits, and the loss if there are labels. Other arguments are those of MegakernelModel.

        labels: (B, N) ids, -100 where the loss does not count; shifted here, as usual in `transformers`.
        logits_to_keep: number of last tokens with logits, or their indices; 0 or with labels: all tokens.
        """
        loss_arguments = {name: kwargs.pop(name, None) for name in ("num_items_in_batch", "shift_labels")}
        for name in ("tokenizer", "assistant_tokenizer"):  # `generate` uses them itself, and passes them on
            kwargs.pop(name, None)
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
        outputs = self.model(*inputs, token_type_ids=token_type_ids, return_dict=True, **kwargs)
        hidden = outputs.last_hidden_state
        has_labels = labels is not None or loss_arguments["shift_labels"] is not None
        if not has_labels:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden = hidden[:, kept]
        logits = self.lm_head(hidden)
        if self.config.logits_scaling != 1:
            logits = logits / self.config.logits_scaling
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = (logits / cap).tanh() * cap
        loss = None
        if has_labels:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **loss_arguments)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        """Disabled: `generate` would continue counting past the end of a document."""

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        """Give `generate` an empty state unless the caller passes one."""
        if (kind := generation_config.cache_implementation) is not None:
            raise ValueError(f"cache_implementation={kind!r} is for keys and values; leave it out")
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = StateCache()
