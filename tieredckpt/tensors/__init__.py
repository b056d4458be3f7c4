"""Tensors, devices and state dicts as bytes; the only code that copies them."""
