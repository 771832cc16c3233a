"""Runners: the model on one kind of device behind one protocol (`base.Runner`)."""
