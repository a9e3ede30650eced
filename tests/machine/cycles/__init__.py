"""What a compiled kernel would cost on a GPU, from its machine code."""
