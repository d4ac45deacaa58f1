"""`headway plan`: search for plans, print what was found, and read plan files.

Begin with `search`. `question` turns options, recipe and cluster into the planner's question,
`output` prints the answer, `mixed_devices` does both for clusters with several types of devices.
"""
