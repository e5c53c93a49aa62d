"""From dense checkpoints to models with kernelized attention, and back out."""
