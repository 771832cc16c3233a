"""One generation: a prompt in, a stream of events out. Knows a `Runner`, never a device, and prints nothing."""
