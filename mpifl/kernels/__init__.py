"""C kernels for exact sums, pooling and training of small networks, and the Python code that calls them."""
