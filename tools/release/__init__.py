"""The parts of tools/release_check.py: versions, archives, environments."""
