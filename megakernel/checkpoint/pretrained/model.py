"""`MegakernelForCausalLM`: a causal language model of this project as a `transformers` model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from megakernel.attention.features import HiddenLayer
from megakernel.attention.mixture import KeyMixture
from megakernel.checkpoint.pretrained_config import MegakernelConfig
from megakernel.model.layer import TransformerLayer

from .cache import Places, StateCache, next_positions

CHUNK = 2048
"""Tokens per chunk without gradients, which bounds the activation memory of a long prompt."""


class MegakernelForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LanguageModel` with the interface of `transformers`.

    Without gradients it reads sequences in chunks into recurrent states, the cache; with gradients it reads whole
    sequences.
    """

    config: MegakernelConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True
    """Disables assisted decoding: a state cannot forget rejected tokens."""

    def __init__(self, config: MegakernelConfig):
        super().__init__(config)
        self.model = config.language_model()
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute next-token logits, and the loss if there are labels.

        Args:
            input_ids: (B, N) tokens that follow those in the cache.
            attention_mask: (B, N), or longer by the tokens in the cache: 1 for text, 0 for padding, which may be on
                the left or on the right of a sequence's text.
            position_ids: (B, N) or (1, N) positions in documents, each of which starts at 0. None: documents start at
                the first token, after padding and, if training isolates documents, after eos_token_id.
            token_type_ids: (B, N) zeros, which some tokenizers return.
            past_key_values: the cache, changed in place.
            labels: (B, N) ids, -100 where the loss does not count; shifted here, as usual in `transformers`.
            use_cache: None: only outside of training. Gradient checkpointing in training disables it.
            logits_to_keep: number of last tokens with logits, or their indices; 0: all tokens.
            **kwargs: arguments of the loss (num_items_in_batch, shift_labels).

        Returns:
            loss, logits (B, N, V) in the dtype of the weights, and the cache.

        Raises:
            ValueError: padding inside a text, positions that jump or exceed a learned table, or unsupported arguments.
        """
        loss_arguments = _loss_arguments(kwargs)
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise ValueError(
                "token_type_ids names a second kind of token, and this model has one; leave it out"
            )
        if use_cache is None or (self.gradient_checkpointing and self.training):
            use_cache = not self.training
        cache = past_key_values if past_key_values is not None else StateCache()
        if not isinstance(cache, StateCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; leave it out, or give a StateCache"
            )
        mask = None if attention_mask is None else self._last_columns(attention_mask, input_ids)
        last = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
        hidden = self._hidden(input_ids, mask, position_ids, cache, use_cache, last)
        if isinstance(logits_to_keep, Tensor) and labels is None:
            hidden = hidden[logits_to_keep]
        logits = self.model.logits(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **loss_arguments)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.model.token_embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.model.token_embedding.tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output head; None if it is tied to the token embedding."""
        return None if self.config.tie_word_embeddings else self.model.output_head.linear

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output head."""
        self.model.output_head.linear = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize as every model does; without mean_resizing new rows are initialized as in training."""
        before = self.config.vocab_size
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = self.config.vocab_size
        if size != before:
            self.config.model = {**(self.config.model or {}), "vocab_size": size}
            self.model.settings = replace(self.model.settings, vocab_size=size)
        if size > before and not mean_resizing:
            for matrix in filter(None, (embeddings, self.get_output_embeddings())):
                self.model.settings.embedding_init_method(matrix.weight.data[before:])
        return embeddings

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """Recompute every n-th layer in the backward pass, as `activation_checkpointing: full` does."""
        self.gradient_checkpointing = enable
        for layer in self.model.modules():
            if isinstance(layer, TransformerLayer):
                layer.recompute = enable and layer.index % every_n_layers == 0

    def _hidden(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        cache: StateCache,
        use_cache: bool,
        last: int,
    ) -> Tensor:
        """Inputs of the head, (N, B, C), of the `last` tokens, or of all if that is 0; updates the cache if used."""
        before = Places.start(tokens) if cache.places is None else cache.places
        restarts_after = self.config.eos_token_id if self.config.isolate_documents else None
        positions, after = next_positions(tokens, mask, before, restarts_after, position_ids)
        self._check_learned_positions(positions)
        if cache.states is None and not use_cache:
            return self.model.hidden(tokens, positions)[-last:]
        size = tokens.shape[1] if torch.is_grad_enabled() else CHUNK
        outputs: list[Tensor] = []
        states = cache.states
        for chunk in zip(tokens.split(size, 1), positions.split(size, 1)):
            hidden, states = self.model.extend(*chunk, states)
            outputs.append(hidden)
            if last:
                outputs = [torch.cat(outputs)[-last:]]
        if use_cache:
            cache.states, cache.places, cache.tokens = states, after, cache.tokens + tokens.shape[1]
        return torch.cat(outputs)

    def _check_learned_positions(self, positions: Tensor) -> None:
        section = self.model.settings.model
        if section.position != "learned" or section.max_positions is None:
            return
        if (last := int(positions.max())) >= section.max_positions:
            raise ValueError(
                f"a text of {last + 1} tokens exceeds the model's {section.max_positions} learned positions; "
                "give a shorter text or a smaller max_new_tokens"
            )

    @staticmethod
    def _last_columns(mask: Tensor, tokens: Tensor) -> Tensor:
        rows, count = tokens.shape
        if mask.dim() != 2 or len(mask) != rows or mask.shape[1] < count:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; give ({rows}, {count}): 1 for text, 0 for padding"
            )
        return mask[:, -count:]

    def _prepare_position_ids_for_generation(self, *_: Any) -> None:
        """Disabled: `generate` would continue counting past the end of a document."""

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        """Give `generate` an empty state unless the caller passes one."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is for keys and values; leave it out"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = StateCache()

    def _init_weights(self, module: nn.Module) -> None:
        """Reset buffers that files do not hold, sums over a training step; layers initialize their own weights."""
        if isinstance(module, HiddenLayer):
            module.begin_step()
        if isinstance(module, KeyMixture) and module.soft and module.m_step:
            module.counted.zero_()


_LOSS_ARGUMENTS = ("num_items_in_batch", "shift_labels")
_GENERATE_ARGUMENTS = ("tokenizer", "assistant_tokenizer")
"""Arguments that `generate` uses itself, for stop strings, and passes on to the model."""


def _loss_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    for name, value in arguments.items():
        if name not in _LOSS_ARGUMENTS + _GENERATE_ARGUMENTS and value is not None and value is not False:
            raise ValueError(f"{name}={value!r} has no meaning for this model; leave it out")
    return {name: arguments[name] for name in _LOSS_ARGUMENTS if name in arguments}
