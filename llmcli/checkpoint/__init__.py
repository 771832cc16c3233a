"""Reads Hugging Face model folders: headers, indexes and byte ranges. Knows nothing of arrays or devices."""
