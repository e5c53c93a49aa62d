"""Up-training: turning dense checkpoints into models with kernelized attention."""
