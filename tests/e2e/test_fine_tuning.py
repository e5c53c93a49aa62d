"""Exported models are tuned by `Trainer`, PEFT and TRL's `SFTTrainer`, with the model's own loss."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from data_pipeline.tokenizers import ByteTokenizer
from megakernel.checkpoint.dense.tokenizer import save_tokenizer
from tests.unit.generation import small_models
from tests.unit.uptraining.test_modeling import CASES, exported, own, texts

pytestmark = pytest.mark.second

TEXTS = [f"def f{number}(x):\n    return x + {number}\n" * (1 + number % 3) for number in range(16)]
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
STEPS = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher's variables, which a training run in this process may have left; no calls to the hub."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def folder_of(case, folder):
    """An export with the tokenizer of bytes."""
    exported(folder, small_models.build(vocab_size=257, vocab_multiple=1, **CASES[case]))
    tokenizer = ByteTokenizer()
    save_tokenizer(tokenizer, folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": tokenizer.eod}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """FLuRKA, softmax, Performer and local attention."""
    return folder_of("mixed", tmp_path_factory.mktemp("model"))


def load(folder):
    return own(folder).from_pretrained(folder)


def labelled(rows=4):
    """Rows of which the first tokens do not count, of each row a different number."""
    ids = texts(rows, 40)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 5 + 7 * row] = -100
    return [{"input_ids": ids[row].tolist(), "labels": labels[row].tolist()} for row in range(rows)]


def test_trainer_takes_the_steps_that_the_models_loss_says(folder, tmp_path):
    """Two micro-batches with different numbers of labels have the gradient of all their tokens together."""
    rows, model = labelled(), load(folder)
    settings = STEPS | {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 0.1}
    settings |= {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(
        output_dir=str(tmp_path), gradient_accumulation_steps=2, gradient_checkpointing=True, **settings
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    by_hand, losses = load(folder).train(), []
    ids, labels = (torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels"))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for _ in range(2):
        logits = by_hand(ids).logits
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([loss.item() for loss in losses], rel=1e-5)
    for (name, one), (_, other) in zip(model.named_parameters(), by_hand.named_parameters()):
        # float32 gradients, summed in another order.
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_trainer_tunes_an_adapter_that_is_saved_and_merged(precision, folder, tmp_path):
    base = load(folder)
    before = copy.deepcopy(base.state_dict())
    adapted = get_peft_model(base, LORA)
    settings = STEPS | {"max_steps": 2, "bf16": precision == "bf16"}
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), gradient_checkpointing=True, **settings)
    trainer = Trainer(adapted, arguments, train_dataset=labelled(8))
    trainer.train()
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    ids = texts(2, 30)
    adapted = trainer.accelerator.unwrap_model(adapted, keep_fp32_wrapper=False).eval()
    with torch.no_grad():
        logits = adapted(ids).logits
        with adapted.disable_adapter():
            untuned = adapted(ids).logits
        torch.testing.assert_close(untuned, load(folder).eval()(ids).logits)
    assert (logits - untuned).abs().max() > 0.01
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        for model in (merged, load(tmp_path / "merged").eval()):
            # float32 logits of order 1 from weights that are sums.
            torch.testing.assert_close(model(ids).logits, logits, atol=1e-4, rtol=1e-4)
    assert merged.state_dict().keys() == before.keys()
    code = "modeling_megakernel.py"
    assert (tmp_path / "merged" / code).read_bytes() == (folder / code).read_bytes()


class RecordingTrainer(SFTTrainer):
    """Also computes the model's own loss of each batch."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        """See Trainer."""
        given = dict(inputs)
        result = super().compute_loss(model, inputs, *args, **kwargs)
        with torch.no_grad():
            expected = model(**given, num_items_in_batch=kwargs["num_items_in_batch"]).loss
        loss = result[0] if isinstance(result, tuple) else result
        self.__dict__.setdefault("losses", []).append((loss.item(), expected.item(), given))
        return result


SPLIT = [{"prompt": text[:8], "completion": text[8:]} for text in TEXTS]
TUNED = {
    "rows of a batch": ("mixed", {}, None),
    "packed": ("mixed", {"packing": True}, None),
    "without checkpoints": ("mixed", {"gradient_checkpointing": False}, None),
    "completions alone": ("mixed", {"completion_only_loss": True}, None),
    "an adapter": ("mixed", {}, LORA),
    "an adapter, packed": ("mixed", {"packing": True}, LORA),
    "capped logits": ("as gemma", {}, None),
    "divided logits": ("as olmo, granite and smollm", {"packing": True}, None),
    "an untied head": ("untied", {}, None),
    "a gated state": ("gated_deltanet", {"packing": True}, None),
}


@pytest.mark.parametrize("how", TUNED)
def test_sft_trainer_of_trl_trains_with_the_models_loss(how, tmp_path):
    case, options, adapter = TUNED[how]
    folder = folder_of(case, tmp_path / "model")
    rows = SPLIT if "completion_only_loss" in options else [{"text": text} for text in TEXTS]
    config = SFTConfig(output_dir=str(tmp_path / "run"), max_length=64, **STEPS, **options)
    trainer = RecordingTrainer(
        load(folder),
        config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapter,
    )
    trainer.train()
    assert len(trainer.losses) == 3
    for loss, expected, inputs in trainer.losses:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert ("cu_seq_lens_q" in inputs) == ("packing" in options)
        assert bool((inputs["labels"] == -100).any())
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([loss for loss, _, _ in trainer.losses], rel=1e-5)
    assert logged[-1] < logged[0]
