"""CUDA C++ of the kernels that prove the model: one memory instruction each, and a small matrix product in six layouts."""
