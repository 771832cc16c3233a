"""The server: OpenAI's protocol over HTTP, for one scheduler."""
