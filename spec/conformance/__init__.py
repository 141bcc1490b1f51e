"""The suite that judges any engine: it follows each call in the executable model and checks every rule."""
