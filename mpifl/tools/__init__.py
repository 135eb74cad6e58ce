"""Commands that look after the machine."""
