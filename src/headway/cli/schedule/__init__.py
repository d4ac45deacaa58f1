"""`headway schedule`: pipeline schedules as tables, before any run.

`show` has the commands list, show, compare and check; `search` and `choose` have one each.
`figures` measures a table at the costs that the user gives.
"""
