"""`headway train`: one process or many, here or under another launcher.

Begin with `command`. Everything that can be checked or decided without torch (options, plan,
emulated nodes) happens before workers start.
"""
