"""From a configuration to the checked objects of a run: keys, defaults, checks, data, model, placement."""
