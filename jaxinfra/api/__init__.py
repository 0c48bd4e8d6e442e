"""What scripts call as ``jaxinfra.NAME`` and no single floor below has."""
