"""`python -m llmcli` is the same program as the console script."""

from llmcli.cli.main import main

main()
