"""Recipes, studies and benchmarks; they may import everything and nothing imports them."""
