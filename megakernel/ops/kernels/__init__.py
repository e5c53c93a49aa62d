"""Device code shared by the ops' Triton implementations, imported only when a kernel first runs."""

from megakernel.ops.kernels import assembler as assembler
