"""Models behind the interface of `transformers`: cache, padding, documents, loss, files."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from data_pipeline.tokenizers import ByteTokenizer
from megakernel.checkpoint.dense import DenseCheckpoint
from megakernel.checkpoint.dense.tokenizer import save_tokenizer
from megakernel.checkpoint.pretrained import MegakernelConfig, MegakernelForCausalLM
from megakernel.checkpoint.pretrained_config import code_of
from megakernel.config import Model
from tests.unit.generation.small_models import MIXED, with_random_weights
from tests.unit.generation.test_decoder import ATTENTION, EOD, PARTS, is_recurrent, state_numel

VOCABULARY = 64


def build(**parts):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    config = MegakernelConfig(
        model=Model(**sizes | parts).model_dump(mode="json"),
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        eos_token_id=EOD,
    )
    return with_random_weights(MegakernelForCausalLM(config).eval())


@pytest.fixture(scope="module")
def mixed():
    return build(attention_pattern=MIXED, num_layers=4)


def not_isolating(model):
    model = copy.deepcopy(model)
    model.config.isolate_documents = False
    return model


def texts(rows, length, seed=1):
    return torch.randint(EOD, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(*rows):
    """Sequences with padding on the left, and their mask."""
    length = max(map(len, rows))
    ids = torch.stack([F.pad(row, (length - len(row), 0), value=EOD) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (length - len(row), 0)) for row in rows])
    return ids, mask


def assert_same(actual, expected):
    # Logits of order 1 in float32, summed in another order.
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_cache_and_padding_do_not_change_logits(parts):
    model = build(**parts)
    ids = texts(2, 33)
    whole = model(ids, use_cache=False).logits
    step = model(ids[:, :27])
    assert_same(step.logits, whole[:, :27])
    cache = step.past_key_values
    cache.reorder_cache(torch.tensor([1, 0]))
    found = [model(token, past_key_values=cache).logits for token in ids.flip(0)[:, 27:].split(1, dim=1)]
    assert_same(torch.cat(found, 1), whole.flip(0)[:, 27:])
    ids, mask = padded(ids[0], ids[1, :20])
    for cached in (True, False):
        logits = model(ids, attention_mask=mask, use_cache=cached).logits
        assert_same(logits[0], whole[0])
        assert_same(logits[1, 13:], whole[1, :20])
    assert not dist.is_initialized()


@torch.no_grad()
def test_a_long_prompt_is_read_in_chunks(mixed, monkeypatch):
    ids = texts(1, 50)
    whole = mixed(ids).logits
    monkeypatch.setattr("megakernel.checkpoint.modeling.decoder.READ", 16)
    assert_same(mixed(ids).logits, whole)
    for cached in (True, False):
        assert_same(mixed(ids, logits_to_keep=3, use_cache=cached).logits, whole[:, -3:])
        assert_same(mixed(ids, logits_to_keep=torch.tensor([4, 40])).logits, whole[:, [4, 40]])


GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": EOD}


def test_a_padded_batch_generates_the_same_as_its_sequences_alone(mixed):
    rows = [texts(1, 21)[0], texts(1, 9, seed=2)[0], texts(1, 16, seed=3)[0]]
    ids, mask = padded(*rows)
    together = mixed.generate(ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :]
    for row, found in zip(rows, together):
        alone = mixed.generate(row[None], **GREEDY)[0, len(row) :]
        assert found.tolist() == F.pad(alone, (0, len(found) - len(alone)), value=EOD).tolist()


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3, "top_k": 8}]
)
def test_beam_search_and_sampling_give_the_same_without_a_cache(options, mixed):
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(mixed.generate(texts(2, 14), use_cache=use_cache, **GREEDY | options).tolist())
    assert found[0] == found[1]


@torch.no_grad()
def test_generation_continues_from_a_cache(mixed):
    ids = texts(1, 30)
    first = mixed.generate(ids[:, :18], return_dict_in_generate=True, **GREEDY)
    conversation = torch.cat([first.sequences, ids[:, 18:]], 1)
    expected = mixed.generate(conversation, **GREEDY)
    # The last generated token has not been read yet.
    assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
    assert (
        mixed.generate(conversation, past_key_values=first.past_key_values, **GREEDY).tolist()
        == expected.tolist()
    )


@pytest.mark.parametrize("name", ["flurka", "performer", "local", "softmax"])
def test_the_cache_of_a_recurrent_model_does_not_grow(name):
    model = build(attention=ATTENTION[name], num_layers=1)
    options = {"do_sample": False, "return_dict_in_generate": True, "suppress_tokens": [EOD]}
    sizes = {
        state_numel(model.generate(texts(1, 5), max_new_tokens=n, **options).past_key_values) for n in (5, 90)
    }
    assert (len(sizes) == 1) == is_recurrent(name)


@torch.no_grad()
def test_documents_are_isolated_as_in_training(mixed):
    first, second = texts(1, 11), texts(1, 14, seed=2)
    ids = torch.cat([first, torch.tensor([[EOD]]), second], 1)
    for chunk in (1, 5, 26):
        cache, logits = None, []
        for part in ids.split(chunk, 1):
            step = mixed(part, past_key_values=cache)
            cache = step.past_key_values
            logits.append(step.logits)
        assert_same(torch.cat(logits, 1)[:, 12:], mixed(second).logits)
    together = not_isolating(mixed)
    assert not torch.allclose(together(ids).logits[:, 12:], mixed(second).logits, atol=1e-2)


def test_labels_give_the_mean_loss_and_its_gradients(mixed):
    model = copy.deepcopy(mixed).train()
    ids, mask = padded(texts(1, 20)[0], texts(1, 13, seed=2)[0])
    labels = ids.masked_fill(mask == 0, -100)
    output = model(ids, attention_mask=mask, labels=labels)
    assert output.past_key_values is None
    targets = labels[:, 1:]
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(x is not None and x.isfinite().all() and x.any() for x in gradients.values())
    # The token count of a whole accumulated batch, as the Trainer of `transformers` passes it.
    summed = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(1)).loss
    torch.testing.assert_close(summed, expected * (targets != -100).sum())


def test_generation_stops_after_a_stop_string(mixed, tmp_path):
    save_tokenizer(ByteTokenizer(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = "12 + 3"
    ids = tokenizer(prompt, return_tensors="pt")
    whole = mixed.generate(**ids, **GREEDY)[0].tolist()
    stop = tokenizer.decode(whole[-4])
    end = whole.index(whole[-4], len(prompt)) + 1
    found = mixed.generate(**ids, stop_strings=[stop], tokenizer=tokenizer, **GREEDY)
    assert found[0].tolist() == whole[:end]
    write = pipeline("text-generation", model=mixed, tokenizer=tokenizer)
    [result] = write(prompt, stop_sequence=stop, return_tensors=True, **GREEDY)
    assert result["generated_token_ids"] == whole[:end]


@torch.no_grad()
def test_position_ids_delimit_packed_texts(mixed):
    one, two = texts(1, 12), texts(1, 9, seed=2)
    alone = [mixed(text).logits for text in (one, two)]
    assert_same(mixed(one, position_ids=torch.arange(12)[None]).logits, alone[0])
    # Texts packed without a token between them.
    packed, places = torch.cat([one, two], 1), torch.cat([torch.arange(12), torch.arange(9)])[None]
    for cached in (True, False):
        found = mixed(packed, position_ids=places, use_cache=cached).logits.split([12, 9], 1)
        assert_same(found[0], alone[0])
        assert_same(found[1], alone[1])
    first = mixed(packed[:, :7], position_ids=places[:, :7])
    rest = mixed(packed[:, 7:], position_ids=places[:, 7:], past_key_values=first.past_key_values)
    assert_same(rest.logits[:, 5:], alone[1])
    ids, mask = padded(one[0], two[0])
    # As `transformers` counts; the positions of padding are arbitrary.
    counted = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    expected = mixed(ids, attention_mask=mask).logits[mask == 1]
    assert_same(mixed(ids, attention_mask=mask, position_ids=counted).logits[mask == 1], expected)
    # By its position ids, a text may continue after the end-of-document token.
    ids = torch.cat([one, torch.tensor([[EOD]]), two], 1)
    assert_same(mixed(ids, position_ids=torch.arange(22)[None]).logits, not_isolating(mixed)(ids).logits)


def test_generation_accepts_the_extra_inputs_of_a_tokenizer(mixed):
    ids = texts(1, 9)
    expected = mixed.generate(ids, **GREEDY).tolist()
    added = {"position_ids": torch.arange(9)[None], "token_type_ids": torch.zeros_like(ids)}
    assert mixed.generate(ids, **added, **GREEDY).tolist() == expected


def saved_bytes(model, ids):
    """Bytes of the tensors saved for backward, and the gradients."""
    model.zero_grad()
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, labels=ids).loss
    total = sum(saved.values())
    loss.backward()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_gradient_checkpointing_saves_less_and_gives_the_same_gradients(mixed):
    model, ids = copy.deepcopy(mixed).train(), texts(2, 40)
    whole, expected = saved_bytes(model, ids)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    less, found = saved_bytes(model, ids)
    assert less < whole / 4
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model(ids, use_cache=True).past_key_values is None
    model.gradient_checkpointing_disable()
    assert saved_bytes(model, ids)[0] == whole


@torch.no_grad()
@pytest.mark.parametrize("parts", [PARTS["mixed"], PARTS["untied"]], ids=["tied", "untied"])
@pytest.mark.parametrize("vocab_size", [80, 50])
def test_a_vocabulary_is_resized_saved_and_loaded(vocab_size, parts, tmp_path):
    model, ids = build(**parts), torch.randint(50, (2, 20))
    before = model(ids).logits
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    after = model(ids).logits
    assert after.shape[-1] == vocab_size
    common = min(vocab_size, VOCABULARY)
    assert torch.equal(after[..., :common], before[..., :common])
    assert vocab_size < VOCABULARY or after[..., common:].std() < 2 * before.std()
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, after)
    assert DenseCheckpoint(tmp_path).model.vocab_size == vocab_size
    model.train()
    with torch.enable_grad():
        assert model(ids, labels=ids).loss.requires_grad


@pytest.mark.parametrize("name", ["mixed", "untied", "learned positions, tied"])
def test_peft_adapts_and_merges_all_linear_layers(name, tmp_path):
    model, ids = build(**PARTS[name]), texts(2, 24)
    bare = copy.deepcopy(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    targets = {key for key, module in bare.named_modules() if isinstance(module, torch.nn.Linear)}
    # PEFT shortens the names if no other module has such an end.
    adapts = set(adapted.peft_config["default"].target_modules)
    found = {key for key in targets if any(f".{key}".endswith(f".{end}") for end in adapts)}
    assert found == targets - {"lm_head"}
    optimizer = torch.optim.AdamW([x for x in adapted.parameters() if x.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(adapted.train()(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[2] < losses[0]
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = adapted.eval()(ids).logits
        loaded = PeftModel.from_pretrained(bare, tmp_path).eval()
        assert torch.equal(loaded(ids).logits, expected)
        assert_same(loaded.merge_and_unload()(ids).logits, expected)


FILES = {
    "mixed": MIXED,
    "noise": ["performer", "fastfood_rks", "gmm_rks"],
    "networks": ["generative_prf", "hedgehog", {"preset": "smgk", "mixture": {"m_step": True}}],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", FILES.values(), ids=FILES)
def test_saved_files_preserve_every_bit_and_dtype(pattern, dtype, tmp_path):
    model = build(attention_pattern=pattern, num_layers=len(pattern))
    model.save_pretrained(tmp_path / "float32", max_shard_size="20KB")
    assert len(list((tmp_path / "float32").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    # Parameters as DeepSpeed casts them, buffers as layers keep them.
    assert {x.dtype for x in loaded.parameters()} == {dtype}
    parameters = dict(loaded.named_parameters())
    for name, expected in model.state_dict().items():
        found = loaded.state_dict()[name]
        is_parameter = name in parameters or name == "lm_head.weight"
        assert found.dtype == (dtype if is_parameter else expected.dtype), name
        assert torch.equal(found, expected.to(found.dtype)), name
    is_tied = loaded.config.tie_word_embeddings
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.dtype == dtype
    written, kept = load_file(tmp_path / "again" / "model.safetensors"), loaded.state_dict()
    assert written.keys() == kept.keys() - ({"lm_head.weight"} if is_tied else set())
    assert all(torch.equal(written[name], kept[name]) for name in written)
    ids = texts(1, 12)
    with torch.no_grad():
        # Bits were compared above. Tensors of a mapped file lie at any address, and the CPU sums unaligned ones
        # in another order.
        assert_same(again(ids).logits, loaded(ids).logits)


def test_a_saved_folder_contains_its_model_code(mixed, tmp_path):
    mixed.save_pretrained(tmp_path)
    config = MegakernelConfig.from_pretrained(tmp_path)
    assert config.auto_map["AutoModelForCausalLM"] == "modeling_megakernel.MegakernelForCausalLM"
    assert (tmp_path / "modeling_megakernel.py").read_text() == code_of(config.section)
    assert config.section == mixed.config.section
    assert (config.hidden_size, config.num_hidden_layers) == (32, 4)


MODULES = {
    "checkpoint": "megakernel.checkpoint.pretrained",
    "uptraining": "megakernel.uptraining.pretrained",
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_a_folder_of_an_earlier_version_that_imports_the_package_loads(module, mixed, tmp_path):
    mixed.save_pretrained(tmp_path)
    import_line = f"from {module} import MegakernelConfig, MegakernelForCausalLM\n"
    (tmp_path / "modeling_megakernel.py").write_text(
        f"try:\n    {import_line}except ImportError:\n    raise\n"
    )
    named = get_class_from_dynamic_module("modeling_megakernel.MegakernelForCausalLM", str(tmp_path))
    assert named is MegakernelForCausalLM
    model = named.from_pretrained(tmp_path)
    for name, weight in mixed.state_dict().items():
        assert model.state_dict()[name].equal(weight), name
    model.save_pretrained(tmp_path)
    code = (tmp_path / "modeling_megakernel.py").read_text()
    assert code == code_of(mixed.config.section)  # no longer needs the package


MASK = torch.tensor([[1, 1, 0, 1]])
FAULTS = {
    "padding inside a text": ({"attention_mask": MASK}, "has padding inside a text; pad on the left"),
    "a mask of other sequences": (
        {"attention_mask": MASK[:, :3]},
        r"attention_mask has shape \(1, 3\); give \(1, 4\)",
    ),
    "another cache": ({"past_key_values": DynamicCache()}, "past_key_values is a DynamicCache; leave it out"),
    "positions that jump": (
        {"position_ids": torch.tensor([[0, 1, 5, 6]])},
        r"position_ids\[0, 2\] is 5; give 2 to continue the text, or 0 to begin one",
    ),
    "positions of other sequences": (
        {"position_ids": torch.arange(3)[None]},
        r"position_ids has shape \(1, 3\); give \(1, 4\)",
    ),
    "kinds of tokens": ({"token_type_ids": MASK}, "token_type_ids names a second kind of token"),
    "weights of attention": (
        {"output_attentions": True},
        "output_attentions=True has no meaning for this model",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_inputs_are_refused_in_one_line(fault, mixed):
    arguments, text = FAULTS[fault]
    with pytest.raises(ValueError, match=text) as caught:
        mixed(texts(1, 4), **arguments)
    assert "\n" not in str(caught.value)


def test_a_text_cannot_continue_after_padding(mixed):
    ids = texts(1, 4)
    cache = mixed(ids, attention_mask=torch.tensor([[1, 1, 1, 0]])).past_key_values
    with pytest.raises(ValueError, match="padding inside a text"):
        mixed(ids[:, :1], past_key_values=cache, attention_mask=torch.tensor([[1, 1, 1, 0, 1]]))


def test_texts_longer_than_the_learned_positions_are_refused():
    model = build(**PARTS["learned positions, tied"])
    assert model(texts(1, 64)).logits.shape == (1, 64, VOCABULARY)
    with pytest.raises(ValueError, match="a text of 65 tokens exceeds the model's 64 learned positions"):
        model(texts(1, 65))


def test_a_recurrent_state_cannot_be_cropped(mixed):
    cache = mixed(texts(1, 4)).past_key_values
    with pytest.raises(ValueError, match="cannot forget tokens; decode without an assistant"):
        cache.crop(1)
    with pytest.raises(ValueError, match="cache_implementation='static' is for keys and values"):
        mixed.generate(texts(1, 4), cache_implementation="static", **GREEDY)


def test_a_configuration_without_a_model_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="export the run again with `megakernel export`"):
        MegakernelForCausalLM(MegakernelConfig())
