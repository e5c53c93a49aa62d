"""Device code that the Triton implementations of the ops share. Nothing here is imported before a kernel runs."""
