"""A causal language model of this project as a model of `transformers`."""

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

from .cache import Places, StateCache, read_on

CHUNK = 2048
"""Tokens that the layers read at once where nothing is trained: memory for a prompt does not grow with its length."""


class MegakernelForCausalLM(PreTrainedModel, GenerationMixin):
    """The layers of `LanguageModel` behind the interface of `transformers`.

    Without gradients sequences are read by chunks into recurrent states, the cache; with gradients whole sequences at
    once.
    """

    config: MegakernelConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True
    """No assisted decoding: a state cannot forget the tokens of a refused guess."""

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
        """Logits of the tokens that follow each token.

        Args:
            input_ids: (B, N) that follow those in the cache.
            attention_mask: (B, N), or with the tokens in the cache before them: 1 for text, 0 for padding, which may
                lie before or behind a sequence's text.
            position_ids: (B, N) or (1, N), of tokens in their texts: 0 begins one. None: texts begin in front, behind
                padding and, where training kept documents apart, behind eos_token_id.
            token_type_ids: (B, N) zeros, which some tokenizers make.
            past_key_values: the cache; changed in place.
            labels: (B, N), ids where the loss counts and -100 elsewhere; shifted here, as everywhere in `transformers`.
            use_cache: None: outside training. Under gradient checkpointing there is none.
            logits_to_keep: of how many last tokens, or of which; 0: of all.
            **kwargs: what the loss takes (num_items_in_batch, shift_labels).

        Returns:
            loss, logits (B, N, V) in the dtype of the weights, and the cache.

        Raises:
            ValueError: padding inside a text, positions that jump or lie beyond a learned table, arguments that have
                no meaning here.
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
        """The matrix of token vectors."""
        return self.model.token_embedding.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace it."""
        self.model.token_embedding.tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head's matrix; None where it is that of the token vectors."""
        return None if self.config.tie_word_embeddings else self.model.output_head.linear

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace it."""
        self.model.output_head.linear = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """As of every model; without mean_resizing new vectors are drawn as training draws them."""
        before = self.config.vocab_size
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = self.config.vocab_size
        if size != before:
            self.config.model = {**(self.config.model or {}), "vocab_size": size}
            self.model.settings = replace(self.model.settings, vocab_size=size)
        if size > before and not mean_resizing:
            for matrix in filter(None, (embeddings, self.get_output_embeddings())):
                self.model.settings.draw(matrix.weight.data[before:])
        return embeddings

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable | None = None,
        every_n_layers: int = 1,
    ) -> None:
        """Keep of every n-th layer its input alone, as `activation_checkpointing: full` does."""
        self.gradient_checkpointing = enable
        for layer in self.model.modules():
            if isinstance(layer, TransformerLayer):
                layer.recompute = enable and layer.index % every_n_layers == 0

    def _hidden(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        given: Tensor | None,
        cache: StateCache,
        use_cache: bool,
        last: int,
    ) -> Tensor:
        """What the head reads, (N, B, C), of the `last` tokens or, where that is 0, of all.

        The cache then knows all of them, where it is used.
        """
        before = Places.start(tokens) if cache.places is None else cache.places
        restarts_after = self.config.eos_token_id if self.config.isolate_documents else None
        positions, after = read_on(tokens, mask, before, restarts_after, given)
        self._check(positions)
        if cache.states is None and not use_cache:
            return self.model.hidden(tokens, positions)[-last:]
        size = tokens.shape[1] if torch.is_grad_enabled() else CHUNK
        kept: list[Tensor] = []
        states = cache.states
        for chunk in zip(tokens.split(size, 1), positions.split(size, 1)):
            hidden, states = self.model.extend(*chunk, states)
            kept.append(hidden)
            if last:
                kept = [torch.cat(kept)[-last:]]
        if use_cache:
            cache.states, cache.places, cache.tokens = states, after, cache.tokens + tokens.shape[1]
        return torch.cat(kept)

    def _check(self, positions: Tensor) -> None:
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
        """None: `generate` would count on behind the end of a document."""

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        """`generate` begins with an empty state, or with the one it is given."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is for keys and values; leave it out"
            )
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = StateCache()

    def _init_weights(self, module: nn.Module) -> None:
        """Layers draw their weights when they are built. What no file holds is set here: sums over a training step."""
        if isinstance(module, HiddenLayer):
            module.begin_step()
        if isinstance(module, KeyMixture) and module.soft and module.m_step:
            module.counted.zero_()


_OF_THE_LOSS = ("num_items_in_batch", "shift_labels")
_OF_GENERATE = ("tokenizer", "assistant_tokenizer")
"""What `generate` has used already, for stop strings, and hands on."""


def _loss_arguments(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if name not in _OF_THE_LOSS + _OF_GENERATE and value is not None and value is not False:
            raise ValueError(f"{name}={value!r} has no meaning for this model; leave it out")
    return {name: given[name] for name in _OF_THE_LOSS if name in given}
