"""What to train: the `Recipe`, recipe.toml, and the user's code behind it.

Enters: a reference (a path, "module:function", or the name of a bundled workload) with overrides.
Leaves: a `Recipe`. Begin at `recipe`, then `check` (without torch) and `factory` (with torch)."""
