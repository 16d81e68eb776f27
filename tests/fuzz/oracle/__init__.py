"""What is right, in fp64 and plain torch; nothing here imports the package (tests/fuzz/test_oracle.py asserts that)."""
