"""Commands other than runs: checks, measurements, documentation, templates and completion."""
