"""One harness for every benchmark: ours and its peers on the same inputs in one process, checked first, then timed."""
