"""Planning of runs and servers: what fits, which mesh, how fast, and how accurate that is."""
