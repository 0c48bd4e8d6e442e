"""Quantization of models: weights in 4 and 8 bits, in formats that other programs read."""
