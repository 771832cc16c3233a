"""A run's receipt: what its text depended on, and the text, as a file; and how two receipts differ."""
