"""A server of one model: what OpenAI's clients ask for, over HTTP."""
