"""When things happen: clocks, delays, networks, policies and sampling."""
