"""Runs several server processes of one model (replicas) behind one address."""
