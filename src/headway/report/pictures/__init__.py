"""Pictures as SVG or PNG, drawn with matplotlib through one canvas.

Begin with `canvas`, which owns colours, light and dark scheme, and reproducible output. matplotlib
is imported only when something is drawn.
"""
