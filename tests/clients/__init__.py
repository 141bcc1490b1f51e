"""Programs that others have written, each in an environment of its own, asking a server with a real model."""
