"""One facade over every kernel; the only importer of pallas_kernels."""
