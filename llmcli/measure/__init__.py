"""Measurements and facts about models, as values; the command line prints them."""
