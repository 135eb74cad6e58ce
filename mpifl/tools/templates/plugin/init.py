"""MyPlugin: a clustered method and a codec for mpifl."""
