"""The vocabulary: types, server, mixings, parameters, randomness, checks. No MPI, no files, no algorithm."""
