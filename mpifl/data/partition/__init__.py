"""Who holds which sample: vectorised cuts of a pool into clients."""
