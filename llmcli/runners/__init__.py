"""Runners: the model on one kind of device, each with the protocol `base.Runner`."""
