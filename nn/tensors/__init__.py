"""The global tensor: the class, its shell, moves, gradients, hooks, copies, text, random seeds, and how one is made."""
