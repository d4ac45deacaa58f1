"""Microbenchmarks of this machine: kernels, links, and the algorithms of a model's layers.

`kernels` and `links` return `cluster.measurement` records, from which `headway cluster measure`
fits a cluster.toml; `layer_algorithms` times the algorithms that torch offers for each layer."""
