"""Starting the processes of a world on this machine, through torch's own elastic agent.

headway has no process supervisor of its own: the agent starts, watches and ends the workers; here
is what a worker does around its work, and the decision whether to start again. Importing this
package does not import torch.
"""
