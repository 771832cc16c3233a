"""A run's receipt: what its text depended on and what the text was, as a file; and how one differs from another."""
