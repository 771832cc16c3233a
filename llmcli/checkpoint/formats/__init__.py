"""How quantized layers are stored: a module for each format, which names its tensors and reads them into our order."""
