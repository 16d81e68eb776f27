"""A differential fuzzer: seeded problems, an oracle of its own in fp64, every backend. docs/fuzzing.md says how to use it."""
