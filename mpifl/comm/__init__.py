"""Everything that moves between ranks. The only package that imports mpi4py."""
