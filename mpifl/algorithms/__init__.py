"""Federated methods: one paper, one file."""
