"""Models made smaller: weights in 4 and 8 bits, by recipes, as other programs read them."""
