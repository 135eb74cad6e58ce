"""Measuring on the user's own machine: mpifl beside a plain PyTorch loop, taking turns in the same minute."""
