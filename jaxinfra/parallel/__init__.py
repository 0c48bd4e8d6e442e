"""Floor 6: meshes, placement of parameters and activations, collectives."""
