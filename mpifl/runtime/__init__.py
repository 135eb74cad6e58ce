"""The engines: one server step, rounds, asynchronous visits, recovery."""
