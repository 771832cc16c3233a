"""One generation: takes a prompt, yields events. Knows a `Runner`, never a device, and prints nothing."""
