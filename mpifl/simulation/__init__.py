"""Time in a simulated federation: clocks, delays, networks, policies and sampling."""
