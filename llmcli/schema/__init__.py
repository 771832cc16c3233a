"""Output held to a schema: JSON Schema, an expression, choices, a grammar. llguidance knows what may come next."""
