"""The OpenAI-compatible server: HTTP in, tokens out, one engine behind it."""
