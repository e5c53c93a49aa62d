"""What `transformers`, and programs that build on it, ask of any model and of `generate`: exported models have it.

`transformers` checks its own models like this; its wheel has no tests.
"""

import copy
import inspect
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

from tests.tiers import tiered
from tests.unit.generation import small_models
from tests.unit.generation.small_models import BLOCKS
from tests.unit.uptraining.test_modeling import CASES, EOD, exported, own, texts

EXPORTS = [
    "mixed",
    "gated_deltanet",
    "flurka",
    "as gemma",
    "as olmo, granite and smollm",
    "flurka with all parts",
    "flurka_decay",
    "learned positions, tied",
    "linear",
    "mamba2",
    "performer",
    "untied",
]
"""Models with a file of their own; `mixed` is FLuRKA, softmax, Performer and local attention."""

PACKAGE = {"flurka_selected": {"preset": "flurka_selected", **BLOCKS}}
"""A mechanism that is imported from this package, which alone chooses blocks."""

NEW = 6
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": EOD, "suppress_tokens": [EOD]}
SAMPLED = {**GREEDY, "do_sample": True}


@dataclass(frozen=True)
class Export:
    """A folder, and the classes that load it."""

    folder: Path
    whole: Any
    base: Any
    config: Any

    def load(self, **options):
        """The model in evaluation mode, in float64."""
        return self.whole.from_pretrained(self.folder, **{"dtype": torch.float64} | options).eval()


def export_of(case, folder):
    """The classes of a folder's own file; auto classes give the package's, where that is imported."""
    if case in PACKAGE:
        from megakernel.checkpoint.pretrained import MegakernelForCausalLM as Whole
        from megakernel.checkpoint.pretrained import MegakernelModel as Base

        exported(folder, small_models.build(attention=PACKAGE[case]))
        return Export(folder, Whole, Base, Whole.config_class)
    exported(folder, small_models.build(**CASES[case]))
    return Export(folder, own(folder), own(folder, "Model"), own(folder, "Config"))


@pytest.fixture(scope="module", params=tiered([*EXPORTS, *PACKAGE], EXPORTS[:2]))
def export(request, tmp_path_factory):
    return export_of(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(export):
    return export.load()


@pytest.fixture
def ids():
    return texts(2, 21)


def padded(ids, left=6):
    """The texts after padding, and their mask."""
    return F.pad(ids, (left, 0), value=EOD), F.pad(torch.ones_like(ids), (left, 0))


def same(actual, expected):
    # float64 numbers of order 1, summed in another order.
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


# Outputs.


def test_a_forward_pass_is_called_as_those_of_other_models(model):
    assert model.main_input_name == "input_ids"
    for part in (model, model.model):
        names = list(inspect.signature(part.forward).parameters)
        assert names[:2] == ["input_ids", "attention_mask"]
        assert {"position_ids", "past_key_values", "inputs_embeds", "use_cache"} <= set(names)


@torch.no_grad()
@pytest.mark.parametrize("where", ["argument", "config.json"])
def test_hidden_states_are_what_enters_each_layer_and_the_head(where, export, ids):
    asked = {"output_hidden_states": True}
    model = export.load(**asked if where == "config.json" else {})
    entered = []
    for module in (*model.model.layers, model.lm_head):
        module.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    found = model(ids, **asked if where == "argument" else {}).hidden_states
    assert len(found) == model.config.num_hidden_layers + 1
    assert {x.shape for x in found} == {(2, 21, model.config.hidden_size)}
    assert all(torch.equal(one, other) for one, other in zip(found, entered, strict=True))
    assert model(ids, output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("checkpoints", [False, True])
def test_gradients_reach_every_hidden_state(checkpoints, model, ids):
    model.train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    outputs = model(inputs_embeds=embeds, output_hidden_states=True)
    for hidden in outputs.hidden_states:
        hidden.retain_grad()
    F.cross_entropy(outputs.logits.flatten(0, 1), ids.flatten()).backward()
    assert all(hidden.grad is not None and hidden.grad.norm() > 0 for hidden in outputs.hidden_states)
    same(embeds.grad, model.config.embedding_multiplier * outputs.hidden_states[0].grad)


def test_attention_weights_are_refused_by_name(export, ids):
    refusal = "output_attentions=True has no meaning for this model; leave it out"
    with pytest.raises(ValueError, match=refusal):
        export.load(output_attentions=True)(ids)
    with pytest.raises(ValueError, match=refusal):
        export.load().generate(ids, output_attentions=True, return_dict_in_generate=True, **GREEDY)


@torch.no_grad()
def test_tuples_have_the_same_parts(export, model, ids):
    asked = {"output_hidden_states": True, "labels": ids}
    named, plain = model(ids, **asked), model(ids, return_dict=False, **asked)
    assert [type(x) for x in plain] == [type(x) for x in named.to_tuple()]
    loss, logits, cache, hidden = plain
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
    assert cache.get_seq_length() == 21
    assert all(torch.equal(one, other) for one, other in zip(hidden, named.hidden_states, strict=True))
    (logits,) = export.load(return_dict=False)(ids, use_cache=False)
    assert torch.equal(logits, named.logits)
    assert len(model.model(ids, return_dict=False)) == 2


@torch.no_grad()
def test_logits_of_the_last_tokens_or_of_chosen_ones(model, ids):
    logits = model(ids).logits
    same(model(ids, logits_to_keep=3).logits, logits[:, -3:])
    same(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])


@torch.no_grad()
def test_a_text_has_the_same_logits_alone_in_a_batch_and_beside_padding(model, ids):
    expected = torch.cat([model(row[None]).logits for row in ids])
    same(model(ids).logits, expected)
    tokens, mask = padded(ids)
    counted = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as `generate` counts positions
    for dtype in (torch.long, torch.bool, torch.float32):
        same(model(tokens, attention_mask=mask.to(dtype)).logits[:, 6:], expected)
    same(model(tokens, attention_mask=mask, position_ids=counted).logits[:, 6:], expected)
    same(model(tokens.flip(1), attention_mask=mask.flip(1)).logits[:, :21], model(ids.flip(1)).logits)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 21, 21\); give \(2, 21\)"):
        model(ids, attention_mask=torch.ones(2, 1, 21, 21))


# Losses and gradients.


def test_the_loss_counts_labels_as_for_other_models(model, ids):
    labels = ids.clone()
    labels[:, :7] = -100
    outputs = model.train()(ids, labels=labels)
    wanted, counted = labels[:, 1:], int((labels[:, 1:] != -100).sum())
    assert counted == 28
    expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), wanted.flatten())
    torch.testing.assert_close(outputs.loss, expected)
    for items in (50, torch.tensor(50)):  # of a step of several micro-batches
        loss = model(ids, labels=labels, num_items_in_batch=items).loss
        torch.testing.assert_close(loss, expected * counted / 50)
    torch.testing.assert_close(model(ids, shift_labels=F.pad(wanted, (0, 1), value=-100)).loss, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(reentrant, export, ids):
    models = [export.load().train() for _ in range(2)]
    models[1].gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert [model.is_gradient_checkpointing for model in models] == [False, True]
    losses = [model(ids, labels=ids).loss for model in models]
    for loss in losses:
        loss.backward()
    same(losses[1], losses[0])
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models)):
        assert one.grad.norm() > 0, name
        same(other.grad, one.grad)
    models[1].gradient_checkpointing_disable()
    assert not models[1].is_gradient_checkpointing


def test_a_frozen_model_passes_gradients_on_to_its_embeddings(model, ids):
    """What adapters need under reentrant checkpoints."""
    model.train().requires_grad_(False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert model(ids).logits.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_computes_and_trains(dtype, export, ids):
    with torch.no_grad():
        expected = export.load()(ids).logits
    for model in (export.load(dtype=dtype), export.load().to(dtype)):
        assert model.dtype == dtype
        outputs = model.train()(ids, labels=ids, output_hidden_states=True)
        assert {x.dtype for x in (outputs.logits, *outputs.hidden_states)} == {dtype}
        # Numbers of 8 bits or more, in two to four layers.
        assert (outputs.logits - expected).std() < 0.1 * expected.std()
        outputs.loss.backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
        assert model.eval().generate(ids, **GREEDY).shape == (2, 21 + NEW)


# Embeddings.


@torch.no_grad()
def test_embeddings_stand_for_their_tokens(model, ids):
    embeds = model.get_input_embeddings()(ids)
    same(model(inputs_embeds=embeds).logits, model(ids).logits)
    first = model(inputs_embeds=embeds[:, :10])
    rest = model(inputs_embeds=embeds[:, 10:], past_key_values=first.past_key_values)
    same(rest.logits, model(ids).logits[:, 10:])
    tokens, mask = padded(ids)
    expected = model.generate(tokens, attention_mask=mask, **GREEDY)
    embeds = model.get_input_embeddings()(tokens)
    given = {"inputs_embeds": embeds, "attention_mask": mask}
    assert torch.equal(model.generate(**given, **GREEDY), expected[:, 27:])
    assert torch.equal(model.generate(**given, use_cache=False, **GREEDY), expected[:, 27:])
    assert torch.equal(model.generate(tokens, **given, **GREEDY), expected)
    for arguments in ({}, {"input_ids": tokens, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
            model(**arguments)


def test_embeddings_and_the_head_are_found_and_replaced(export, model):
    base, words = model.model, model.config.vocab_size
    assert model.get_decoder() is model.base_model is base
    assert model.get_input_embeddings() is base.get_input_embeddings() is base.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    tied = model.lm_head.weight is base.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    new, head = nn.Embedding(words, model.config.hidden_size), nn.Linear(1, 1)
    model.set_input_embeddings(new)
    assert base.embed_tokens is model.get_input_embeddings() is new
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head
    assert export.base.from_pretrained(export.folder).get_output_embeddings() is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary_keeps_the_old_logits(tied, export, ids, tmp_path):
    config = export.config.from_pretrained(export.folder, tie_word_embeddings=tied)
    model = export.whole(config).double().eval()
    words = model.config.vocab_size
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(words + 7)
        logits = model(ids).logits
    same(logits[..., :words], before)
    assert logits.shape[-1] == model.config.vocab_size == words + 7
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    wide = ids.clone()
    wide[:, 3] = words + 6
    model.train()(wide, labels=wide).loss.backward()
    assert model.lm_head.weight.grad.shape == (words + 7, model.config.hidden_size)
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        same(export.whole.from_pretrained(tmp_path).eval()(wide).logits, model(wide).logits)
        model.resize_token_embeddings(words + 9, pad_to_multiple_of=16)
        assert model(ids).logits.shape[-1] == model.config.vocab_size == words + 16
        model.resize_token_embeddings(words - 2)
        few = ids.clamp(max=words - 3)
        assert model(few).logits.shape[-1] == len(model.lm_head.weight) == words - 2
    base = export.base.from_pretrained(export.folder)
    base.resize_token_embeddings(words + 7)
    assert len(base.embed_tokens.weight) == words + 7


# Folders.


@torch.no_grad()
def test_a_saved_model_is_whole_and_has_shared_weights_once(export, model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) is not model.config.tie_word_embeddings
    again, found = export.whole.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()), found
    same(again.eval()(ids).logits, model(ids).logits)
    other = export.whole(model.config).double().eval()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for twin in (other, copy.deepcopy(model)):
        same(twin(ids).logits, model(ids).logits)


def test_the_base_model_and_the_whole_one_load_each_others_folders(export, ids, tmp_path):
    base, found = export.base.from_pretrained(export.folder, output_loading_info=True)
    assert not found["missing_keys"]
    base.save_pretrained(tmp_path)
    whole, found = export.whole.from_pretrained(tmp_path, output_loading_info=True)
    assert found["missing_keys"] == (set() if whole.config.tie_word_embeddings else {"lm_head.weight"})
    with torch.no_grad():
        hidden = [part.eval()(ids).last_hidden_state for part in (base, whole.model)]
    torch.testing.assert_close(*hidden)


def test_weights_that_a_folder_lacks_have_the_values_of_a_new_model(
    export, model, ids, tmp_path, monkeypatch
):
    config = export.config.from_pretrained(export.folder)
    config.save_pretrained(tmp_path)
    stored, name = load_file(export.folder / "model.safetensors"), "model.norm.weight"
    kept = {name: stored[name]}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    empty = torch.empty_like

    def unset(like, **options):  # memory as it may be, before anything is written to it
        return empty(like, **options).fill_(torch.nan if like.is_floating_point() else 0)

    monkeypatch.setattr(torch, "empty_like", unset)
    loaded, found = export.whole.from_pretrained(tmp_path, output_loading_info=True)
    monkeypatch.undo()
    new, drawn = export.whole(config).state_dict(), 0
    assert found["missing_keys"] >= stored.keys() - kept.keys()
    for name, x in loaded.state_dict().items():
        if name in kept:
            assert torch.equal(x, kept[name])
        elif torch.equal(x, new[name]):
            continue
        else:  # random numbers
            drawn += 1
            assert new[name].std() > 0, name
            torch.testing.assert_close(x.std(), new[name].std(), rtol=0.5, atol=0)
    assert drawn
    with torch.no_grad():
        assert loaded.eval()(ids).logits.isfinite().all()
        deeper = export.load(num_hidden_layers=model.config.num_hidden_layers + 1)
        assert deeper(ids).logits.isfinite().all()


def test_sizes_that_differ_are_refused_or_drawn_anew(export, ids):
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        export.load(vocab_size=50)
    model = export.load(vocab_size=50, ignore_mismatched_sizes=True)
    assert model(ids.clamp(max=49)).logits.shape == (2, 21, 50)


def test_a_configuration_is_written_and_read_back(export, tmp_path):
    config = export.config.from_pretrained(export.folder)
    config.save_pretrained(tmp_path)
    again = export.config.from_pretrained(tmp_path)
    for twin in (again, export.config.from_dict(config.to_dict()), copy.deepcopy(config)):
        assert twin.to_dict() == config.to_dict()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["MegakernelForCausalLM"]
    assert (config.num_attention_heads, config.vocab_size) == (4, 64)
    assert json.loads(export.config().to_json_string())["model_type"] == "megakernel"
    for name in ("output_hidden_states", "output_attentions", "return_dict", "num_labels"):
        assert hasattr(config, name)


def test_models_are_made_without_memory_and_have_no_tensors_that_do_not_move(export, model):
    for module in model.modules():
        assert not [name for name, x in vars(module).items() if isinstance(x, torch.Tensor)]
    with torch.device("meta"):
        empty = export.whole(export.config.from_pretrained(export.folder))
    assert all(x.is_meta for x in empty.parameters())
    assert empty.num_parameters() == model.num_parameters()
    with torch.device("cpu"):
        export.load()


# Generation.


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        {**SAMPLED, "num_return_sequences": 2},
        {**GREEDY, "num_beams": 3, "num_return_sequences": 2},
        {**SAMPLED, "num_beams": 3},
    ],
    ids=["greedy", "sampling", "beams", "beam sampling"],
)
def test_a_cache_and_padding_change_no_generated_text(options, model, ids):
    tokens, mask = padded(ids)
    rows = 2 * options.get("num_return_sequences", 1)
    found = []
    for given in ({"use_cache": True}, {"use_cache": False}, {"attention_mask": mask}):
        torch.manual_seed(3)
        of = tokens if "attention_mask" in given else ids
        found.append(model.generate(of, **given, **options)[:, of.shape[1] :])
    assert found[0].shape == (rows, NEW)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_outputs_of_generation_have_their_parts(model, ids):
    asked = ("output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate")
    found = model.generate(ids, **dict.fromkeys(asked, True), **GREEDY)
    assert found.sequences.shape == (2, 21 + NEW)
    assert len(found.scores) == len(found.logits) == len(found.hidden_states) == NEW
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    assert [x.shape for x in found.hidden_states[0]] == [(2, 21, hidden)] * (layers + 1)
    assert [x.shape for x in found.hidden_states[1]] == [(2, 1, hidden)] * (layers + 1)
    assert found.past_key_values.get_seq_length() == 21 + NEW - 1
    with torch.no_grad():
        logits = model(found.sequences).logits[:, 20:-1]
    torch.testing.assert_close(torch.stack(found.logits, 1), logits.float())


def test_generation_goes_on_from_a_cache(model, ids):
    tokens, mask = padded(ids)
    half = {**GREEDY, "max_new_tokens": NEW // 2}
    expected = model.generate(tokens, attention_mask=mask, **GREEDY)
    first = model.generate(tokens, attention_mask=mask, return_dict_in_generate=True, **half)
    longer = F.pad(mask, (0, NEW // 2), value=1)
    going_on = {"past_key_values": copy.deepcopy(first.past_key_values), "attention_mask": longer}
    assert torch.equal(model.generate(first.sequences, **going_on, **half), expected)
    embeds = model.get_input_embeddings()(first.sequences)
    going_on["past_key_values"] = first.past_key_values
    found = model.generate(inputs_embeds=embeds, **going_on, **half)
    assert torch.equal(found, expected[:, 27 + NEW // 2 :])


def test_prompts_are_read_in_pieces_and_positions_may_be_given(model, ids):
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, prefill_chunk_size=5, **GREEDY), expected)
    assert torch.equal(model.generate(ids, position_ids=torch.arange(21).expand(2, -1), **GREEDY), expected)
    assert model.generate(max_new_tokens=3, bos_token_id=1, pad_token_id=EOD).shape[0] == 1


REFUSED = {
    "an assistant": ({"assistant_model": None}, "assisted generation is not supported with stateful models"),
    "tokens of the prompt": (
        {"prompt_lookup_num_tokens": 3},
        "assisted generation is not supported with stateful models",
    ),
    "the model's own first layers": (
        {"assistant_early_exit": 1},
        "assisted generation is not supported with stateful models",
    ),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search requires"),
    "a static cache": (
        {"cache_implementation": "static"},
        "cache_implementation='static' is for keys and values; leave it out",
    ),
    "a cache of keys and values": (
        {"past_key_values": DynamicCache},
        "past_key_values is a DynamicCache; leave it out",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_decoding_that_a_state_cannot_do_is_refused_in_one_line(what, model, ids):
    options, message = REFUSED[what]
    options = {name: value() if isinstance(value, type) else value for name, value in options.items()}
    if "assistant_model" in options:
        options["assistant_model"] = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message) as caught:
        model.generate(ids[:1], **options, **GREEDY)
    assert "\n" not in str(caught.value)


def test_a_cache_that_is_not_to_be_changed_can_be_copied(model, ids):
    """Several answers to one prompt, which is read once."""
    with torch.no_grad():
        cache = model(ids[:, :-1]).past_key_values
    expected = model.generate(ids, **GREEDY)
    for _ in range(2):
        found = model.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY)
        assert torch.equal(found, expected)
