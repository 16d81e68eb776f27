"""GPU tests in several processes at once; ``__main__`` is the command."""
