"""What the server says and keeps to, apart from HTTP: limits, errors, completions, and the engine's thread."""
