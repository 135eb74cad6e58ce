"""Communication between ranks; the only package that imports mpi4py."""
