"""Rows of the server: exact sums, mixing over ranks, where tables and client state are kept."""
