"""The engines: the server step, synchronous rounds, asynchronous visits, and recovery from lost ranks."""
