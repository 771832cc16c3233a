"""How long it takes: the launches of a dry run, and their prices."""
