"""What CuTe DSL kernels of several families and implementations share; it knows none of them.

All but this file import the CuTe DSL; only what compiles kernels imports them.
"""
