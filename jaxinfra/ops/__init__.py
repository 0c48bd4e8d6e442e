"""Operations that models call; the only package of jaxinfra that imports ``pallas_kernels``."""
