"""The forward pass's operators in numpy: small models in float32. No torch.

Importing torch costs a start some two seconds of the processor. A model of fewer than `SMALL_PARAMETERS` parameters,
such as the storyteller, has answered before that.
"""
