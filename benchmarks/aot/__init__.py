"""Training steps as compilers of accelerators make them, read without an accelerator."""
