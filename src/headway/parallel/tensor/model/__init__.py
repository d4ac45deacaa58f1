"""Splitting the user's model over a process grid: infer the layout, place parameters, hook in.

Begin with `split_model.split_model`. `split_inference` finds out what can be split,
`parameters` says how modules hold their parts."""
