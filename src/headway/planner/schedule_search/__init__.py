"""Search for pipeline tables under a memory bound, with proven lower bounds.

`search_schedule` in `tables` is the entry; `placements` says where stages may lie. Works for
unequal stages and ranks.
"""
