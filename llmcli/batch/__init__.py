"""Many prompts in one run: the input lines, the output lines, and how an interrupted run resumes."""
