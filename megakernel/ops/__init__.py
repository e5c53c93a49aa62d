"""Attention as tensor functions, each with a readable reference and a fast implementation.

Every op is a function in the module of its name, such as `kernel_attention` in `megakernel.ops.kernel_attention`.
"""
