"""Serves a trained model over HTTP, with OpenAI's completions API and a page that shows how tokens are routed."""
