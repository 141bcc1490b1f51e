"""Adapters: each offers one engine, or one attention kernel, to be judged, and imports it when it is asked to."""
