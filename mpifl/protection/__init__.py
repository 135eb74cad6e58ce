"""Protection: attacks, robust rules, privacy and secure sums, which change what is sent and summed."""
