"""Output held to a JSON Schema, an expression, choices, or a grammar. llguidance knows what may come next."""
