"""Benchmarks on the user's own machine: mpifl and a plain PyTorch loop take turns within the same minute."""
