"""The process group backend "headway" for torch.distributed, and the connections it uses.

Begin with `process_group`. A collective call becomes a `CollectiveProgram`, which `interpreter`
runs with point-to-point messages over the connections of `connection`; `torch_compat` holds every
half-public name of torch that a Python backend needs."""
