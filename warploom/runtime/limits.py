"""Limits that hold for every call."""

LONGEST = 2**29  # keys, or rows, of a call that column vectors describe: sums of positions stay within their 32 bits
