"""Many prompts in one run: the lines that come in, the lines that go out, and how a run is gone on with."""
