"""A block of a compiled Hopper kernel, run on this CPU for its synchronisation only: nothing that it computes is looked at.

``ptx`` reads the code that the compiler made, ``lanes`` has its integer instructions, ``clocks`` who is ordered after whom,
``machine`` its barriers, copies and memory, ``launch`` the kernel's parameters.
"""
