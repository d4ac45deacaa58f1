"""Large samples in slabs: each rank reads its own box of a sample, once, and keeps it.

For spatial parallelism. `slab_source` reads boxes from HDF5, .npy and zarr files; `slab_store`
keeps them in the memory of all ranks and sends them to their next consumer by the rule in
`ownership`.
Oyama et al. 2020, "The Case for Strong Scaling in Deep Learning" (LBANN's data store)."""
