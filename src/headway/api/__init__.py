"""What a Python user calls: `plan`, `train`, `verify`, `simulate`; the names are in `headway`.

Each function takes what is at hand (a `Recipe`, "module:function" or a recipe.toml; a `Cluster`, a
preset or a cluster.toml; a `Plan` or its file), prints nothing and returns frozen results; what the
command line tells beside them goes to the logger "headway" and to `warnings`.
"""
