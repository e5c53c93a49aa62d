"""README.md of an exported folder: how to load the model, its layers, its evaluation."""

from collections import Counter
from pathlib import Path

from megakernel import __version__
from megakernel.config import Attention, Model

from .dense.own import OWN, package_mechanisms

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

tokenizer = AutoTokenizer.from_pretrained("PATH"{remote})
model = AutoModelForCausalLM.from_pretrained("PATH"{remote})
prompt = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))
```

* Attention of its {layers} layers: {attention}.
* Hidden size {hidden}, {heads} heads, trained on sequences of {seq_len} tokens.
{needs}* License: {license}whoever publishes the weights must name theirs (`license:` in the header of this page).
"""

_NEEDS = "* It needs Megakernel installed (from its sources), which alone has its mechanisms: {}.\n"

_CODE = "`modeling_megakernel.py` is Apache-2.0; "


def model_card(name: str, step: int, model: Model, seq_len: int, model_type: str, evaluation: Path) -> str:
    """Text of README.md.

    Args:
        name: name of the run.
        step: step of the checkpoint.
        model: the model section.
        seq_len: tokens of the longest training sequences.
        model_type: that of config.json.
        evaluation: folder with TASK.md for each task evaluated at this step; it need not exist.
    """
    counts = Counter(map(_mechanism_name, model.attentions))
    is_own = model_type == OWN
    mechanisms = package_mechanisms(model)
    text = _TEXT.format(
        name=name,
        version=__version__,
        step=step,
        remote=", trust_remote_code=True" if is_own else "",
        layers=model.num_layers,
        attention=", ".join(f"{count} x {what}" for what, count in counts.items()),
        hidden=model.hidden_size,
        heads=model.num_heads,
        seq_len=seq_len,
        license=_CODE if is_own else "",
        needs=_NEEDS.format(", ".join(mechanisms)) if is_own and mechanisms else "",
    )
    tables = [file.read_text(encoding="utf-8").strip() for file in sorted(evaluation.glob("*.md"))]
    return text + "".join(f"\n{part}\n" for part in (["## Evaluation", *tables] if tables else []))


def _mechanism_name(attention: Attention) -> str:
    """Name of the mechanism, with its feature map."""
    kind = attention.spec.name
    return kind if attention.feature_map is None else f"{kind} ({attention.feature_map.name})"
