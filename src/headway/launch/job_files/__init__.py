"""Job files of other launchers, which start a recipe on several machines.

Text from a few facts; nothing is started, and torch is not imported.
"""
