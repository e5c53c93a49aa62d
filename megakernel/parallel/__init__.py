"""Processes: the mesh over Megatron-core's groups, sequence exchange, sharded heads, the device beneath."""
