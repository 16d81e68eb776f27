"""The subcommands of `warploom`, one module each."""
