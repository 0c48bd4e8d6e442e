"""Analysis of a compiled program's memory: roles, pictures and remedies."""
