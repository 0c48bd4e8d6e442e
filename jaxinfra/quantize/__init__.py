"""Quantization of model weights to 4 and 8 bits, in formats that other programs read."""
