"""Starting the processes of a world on this machine, through torch's own elastic agent.

The agent starts, watches and ends the workers; here is what a worker does around its work, and the
decision whether to start again. Elastic jobs (`elastic`) are watched by their own launcher.
Importing this package does not import torch.
"""
