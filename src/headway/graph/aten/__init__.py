"""What is known of each kind of aten operator: its index expression, its FLOPs and its bytes.

`operator_axes.axes_of` turns a call into the axes along which it may be split, `flops` counts its
work. An operator without an index expression can only be replicated; `ModelGraph.unknown`
lists those. Pure arithmetic: nothing here imports torch.
"""
