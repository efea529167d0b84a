"""What the compilers of accelerators make of a training step, read without an accelerator."""
