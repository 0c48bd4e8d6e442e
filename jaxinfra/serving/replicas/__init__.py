"""Several servers of one model behind one address."""
