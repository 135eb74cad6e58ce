"""Takes an experiment from its configuration to a complete run folder: steps, checkpoints, callbacks."""
