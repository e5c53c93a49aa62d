"""Device code shared by the ops' Triton implementations, imported only when a kernel first runs."""
