"""What `llmcli chat` is made of: the state of a session, the display of an answer, the commands, the two loops."""
