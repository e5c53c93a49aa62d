"""The path from text to sequence-sharded batches: sources, tokenizers, token files, and sample order."""
