"""The process group backend "headway" for torch.distributed, and the connections it uses."""
