"""Weight quantization as mathematics on arrays: schemes, rounding, packing, error measures. Opens no files."""
