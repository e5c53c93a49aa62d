"""Uses an exported folder without this repository, and prints the results as JSON.

Arguments: the folder, a new folder to write to, and tokens as JSON.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

ABSENT = ("megakernel", "launch", "data_pipeline", "megatron", "deepspeed", "pydantic")

if __name__ == "__main__":
    assert [name for name in ABSENT if importlib.util.find_spec(name) is not None] == []
    folder, out, ids = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    results = {}
    start = time.process_time()
    import transformers  # noqa: F401

    results["transformers_seconds"], start = time.process_time() - start, time.process_time()
    # The modules of `transformers` that AutoModelForCausalLM imports for every folder.
    from transformers import (  # noqa: F401
        AutoModel,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationMixin,
        PreTrainedModel,
    )

    results["their_models_seconds"], start = time.process_time() - start, time.process_time()
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    get_class_from_dynamic_module("modeling_megakernel.MegakernelForCausalLM", str(folder))
    results["class_seconds"] = time.process_time() - start

    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    def load(folder):
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()

    model, tokens = load(folder), torch.tensor([ids])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        torch.save({"logits": model(tokens).logits}, out / "logits.pt")
        base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
        hidden = base(input_ids=tokens).last_hidden_state
        results["headless"] = torch.equal(model.lm_head(hidden), model(tokens).logits)

    def same(one, other):
        """Whether all tensors are bit-identical, and the largest difference of the two models' logits."""
        before, after = one.eval().state_dict(), other.eval().state_dict()
        identical = before.keys() == after.keys() and all(
            torch.equal(before[name], after[name]) for name in before
        )
        with torch.no_grad():
            return [identical, (one(tokens).logits - other(tokens).logits).abs().max().item()]

    greedy = {"max_new_tokens": 24, "do_sample": False}

    def generated(rows, of=model, **options):
        given = tokenizer(rows, return_tensors="pt", padding=True, padding_side="left")
        outputs = of.generate(**given, **greedy | options)[:, given["input_ids"].shape[1] :]
        return [tokenizer.decode(row, skip_special_tokens=True) for row in outputs]

    prompts = ["import ", "def f(x):\n    return é"]
    results["texts"] = [generated([prompt])[0] for prompt in prompts]
    results["padded"] = generated(prompts)
    results["beams"] = [generated(prompts, num_beams=3, use_cache=used) for used in (True, False)]
    results["stop"] = stop = results["texts"][1][5:7]
    results["stopped"] = generated(prompts[1:], stop_strings=[stop], tokenizer=tokenizer)[0]

    # A short fine-tuning with gradient checkpointing.
    rows = [{"input_ids": ids[place : place + 32]} for place in range(0, 64, 8)]
    arguments = TrainingArguments(
        output_dir=str(out / "trainer"),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        logging_steps=1,
        save_steps=6,
        report_to="none",
        use_cpu=True,
        seed=0,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(load(folder), arguments, train_dataset=rows, data_collator=collator)
    trainer.train()
    results["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tuned = load(out / "trainer" / "checkpoint-6")  # as self-contained as the folder that it was tuned from
    results["trained"] = same(trainer.model, tuned)

    # PEFT.
    adapted = get_peft_model(
        load(folder), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW([x for x in adapted.parameters() if x.requires_grad], lr=0.05)
    for _ in range(2):
        loss = adapted.train()(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    adapted.save_pretrained(out / "adapter")
    again = PeftModel.from_pretrained(load(folder), out / "adapter")
    results["adapted"] = same(adapted, again)
    merged = again.merge_and_unload()
    results["merged_apart"] = (merged(tokens).logits - adapted(tokens).logits).abs().max().item()
    merged.save_pretrained(out / "merged")
    results["merged"] = same(merged, load(out / "merged"))

    # A larger vocabulary, saved and loaded again.
    grown = load(folder)
    grown.resize_token_embeddings(grown.config.vocab_size + 7)
    grown.save_pretrained(out / "grown")
    results["words"] = grown(tokens).logits.shape[-1]
    results["grown"] = same(grown, load(out / "grown"))

    results["loaded"] = [name for name in ABSENT if name in sys.modules]
    results["code_is_kept"] = [
        (place / "modeling_megakernel.py").read_bytes() == (folder / "modeling_megakernel.py").read_bytes()
        for place in (out / "trainer" / "checkpoint-6", out / "merged", out / "grown")
    ]
    print(json.dumps(results))
