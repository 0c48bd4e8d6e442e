"""The parts of a decoder, each with its own config and logical dims."""
