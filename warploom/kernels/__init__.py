"""What kernels of several families or implementations share."""
