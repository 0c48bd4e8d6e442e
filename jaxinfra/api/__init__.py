"""Functions of ``jaxinfra.NAME`` that no single room below has."""
