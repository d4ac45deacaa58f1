"""Exchange methods: how one bucket becomes the same on all ranks of a route.

`method` has the interface and the plain all-reduce; `hierarchical` and `adasum` build on its
point-to-point operations. Methods that send less than the whole gradient are in `comm.compress`."""
