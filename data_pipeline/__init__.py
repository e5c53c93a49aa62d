"""Text in, sequence-sharded batches out: sources, tokenizers, token files, and the order of samples."""
