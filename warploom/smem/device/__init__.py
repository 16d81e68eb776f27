"""The laboratory on a GPU: kernels whose layouts differ, their times, and the model held against hardware counters."""
