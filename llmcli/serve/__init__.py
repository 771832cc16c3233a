"""The server: OpenAI's protocol over HTTP in front of one scheduler."""
