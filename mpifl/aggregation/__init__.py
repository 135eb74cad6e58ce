"""The server's rows: exact sums, mixing over ranks, and storage of tables and client state."""
