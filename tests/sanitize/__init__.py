"""compute-sanitizer over one small problem of each compiled kernel: `python -m tests.sanitize`, or `make sanitize`."""
