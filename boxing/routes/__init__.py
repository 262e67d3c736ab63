"""Routes from one layout to another.

moves        of a tensor, on one placement or between two
route        the cheapest collectives on one; missing: what ranks need and do not hold
program      what each rank sends, receives and keeps
bound        the bytes that no route can do without
"""
