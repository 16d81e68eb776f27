"""What Triton kernels of several families share."""
