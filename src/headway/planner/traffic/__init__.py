"""The collectives that a plan issues in one step: kind, axis, bytes and number.

`estimate` lists what a point of the search is priced by, `executor` what headway's executor,
DistributedDataParallel and FSDP2 send. All are held against recorded runs by the tests.
"""
