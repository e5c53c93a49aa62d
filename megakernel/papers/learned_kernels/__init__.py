"""Learning the Transformer Kernel: what the noise of its random features changes. Its maps are in `attention`."""
