"""The shard of configuration that a run is laid on which starts from a dense checkpoint."""

from megakernel.config import yaml_text

from .checkpoint import DenseCheckpoint


def fragment(checkpoint: DenseCheckpoint) -> str:
    """YAML with the `model` and `init` sections; model.attention is softmax, which gives the dense model's outputs."""
    folder = checkpoint.folder.resolve()
    lines = [
        f"# {checkpoint.config['model_type']} from {folder}, made by `megakernel import`.",
        f"# Its data: megakernel prepare --source SOURCE --tokenizer {folder} --out DIR",
        yaml_text.write({"model": checkpoint.section, "init": {"from": str(folder)}}),
    ]
    return "\n".join(lines)
