"""Every model class of the installed transformers, built tiny: warploom against eager.

python -m tests.integrations.sweep --help
"""
