"""Meshes, placement of parameters and activations, collectives."""
