"""compute-sanitizer over one small problem of each compiled kernel: `python -m tests.gpu.sanitize`, or `make sanitize`."""
