"""The runner on NVIDIA cards, in four rooms: `plan` decides, `step` runs, `predict` prices the launches, `load` begins.

Each imports only those named before it.
"""
