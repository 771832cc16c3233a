"""The engine at the far end of a link: in another process, as `serve` has it, or on another machine, for `batch`."""
