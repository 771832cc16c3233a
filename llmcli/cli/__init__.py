"""The command line: arguments in, text out. Nothing else in the project prints."""
