"""The forward pass's operators in torch: the reference for every other runner. The only room with torch."""
