"""A trained model over HTTP: OpenAI's completions, and the page that shows how tokens are routed."""
