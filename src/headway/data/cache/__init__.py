"""The data cache: samples of a slow source kept on a local disk and in host memory.

`cached_source` is what users get (`headway.data.cached`); it reads through the `levels`, which keep
serialized samples in a `blob_store` that all processes of a node share."""
