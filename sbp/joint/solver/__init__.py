"""Solving a problem of choices: presolved, eliminated, or by an integer program or bounds, within a limit of memory."""
