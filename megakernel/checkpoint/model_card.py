"""README.md of an exported folder: how it is loaded, what its layers are, what was measured."""

from collections import Counter
from pathlib import Path

from megakernel import __version__
from megakernel.config import Attention, Model

from .dense.families import OWN

CARD = "README.md"

_TEXT = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- megakernel
---

# {name}

A causal language model, exported by Megakernel {version} at step {step}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH"{remote})
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))
```

* Attention of its {layers} layers: {attention}.
* Hidden size {hidden}, {heads} heads, trained on sequences of {seq_len} tokens.
* Licence: {licence}that of the weights is for whoever publishes them to name (`license:` in the head of this page).
"""

_CODE = "`modeling_megakernel.py` is Apache-2.0; "


def model_card(name: str, step: int, model: Model, seq_len: int, model_type: str, evaluation: Path) -> str:
    """The text.

    Args:
        name: of the run.
        step: of the checkpoint.
        model: what was trained.
        seq_len: tokens of the longest sequences of training.
        model_type: of config.json.
        evaluation: folder of what was measured at this step, TASK.md for each task; it need not exist.
    """
    named = Counter(map(_named, model.attentions))
    is_own = model_type == OWN
    text = _TEXT.format(
        name=name,
        version=__version__,
        step=step,
        remote=", trust_remote_code=True" if is_own else "",
        layers=model.num_layers,
        attention=", ".join(f"{count} x {what}" for what, count in named.items()),
        hidden=model.hidden_size,
        heads=model.num_heads,
        seq_len=seq_len,
        licence=_CODE if is_own else "",
    )
    tables = [file.read_text(encoding="utf-8").strip() for file in sorted(evaluation.glob("*.md"))]
    return text + "".join(f"\n{part}\n" for part in (["## Evaluation", *tables] if tables else []))


def _named(form: Attention) -> str:
    """The mechanism and its feature map."""
    kind = form.spec.layer.partition(".")[0].replace("_", " ")
    return kind if form.feature_map is None else f"{kind} ({form.feature_map.name})"
