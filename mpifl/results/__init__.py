"""What a run leaves behind: metrics, tables, figures."""
