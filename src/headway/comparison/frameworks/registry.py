"""The frameworks that headway knows, each with its adapter; none is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_ROOM = "headway.comparison.frameworks"
PLAIN = f"{_ROOM}.plain:PlainLoop"
"""The loop that the others change."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework.

    Attributes:
        name: As `--with` has it.
        adapter: "module:Class".
        what: In a sentence.
        environment: The name of its environment; "": that of headway, with torch alone.
        least: The fewest processes with which it makes sense.
        exact: Whether it computes what one process computes, but for rounding.
    """

    name: str
    adapter: str
    what: str
    environment: str = ""
    least: int = 1
    exact: bool = True


FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {
        framework.name: framework
        for framework in (
            Framework(
                name="ddp",
                adapter=f"{_ROOM}.ddp:Ddp",
                what="torch's DistributedDataParallel",
            ),
            Framework(
                name="ddp-fp16",
                adapter=f"{_ROOM}.ddp_hooks:DdpFp16",
                what="torch's DistributedDataParallel with gradients sent in half precision",
                exact=False,
            ),
            Framework(
                name="ddp-powersgd",
                adapter=f"{_ROOM}.ddp_hooks:DdpPowerSgd",
                what="torch's DistributedDataParallel with gradients sent as matrices of rank 1",
                exact=False,
            ),
            Framework(
                name="fsdp2",
                adapter=f"{_ROOM}.fsdp2:FullyShard",
                what="torch's fully_shard of each block",
            ),
            Framework(
                name="zero1",
                adapter=f"{_ROOM}.zero1:ZeroRedundancy",
                what="torch's ZeroRedundancyOptimizer under DistributedDataParallel",
            ),
            Framework(
                name="torch-pipelining",
                adapter=f"{_ROOM}.torch_pipelining:TorchPipelining",
                what="torch.distributed.pipelining, a stage a process, schedule 1F1B",
                least=2,
            ),
            Framework(
                name="deepspeed",
                adapter=f"{_ROOM}.deepspeed:DeepSpeed",
                what="DeepSpeed with ZeRO stage 1",
                environment="deepspeed",
            ),
            Framework(
                name="deepspeed-zero2",
                adapter=f"{_ROOM}.deepspeed:DeepSpeedZero2",
                what="DeepSpeed with ZeRO stage 2",
                environment="deepspeed",
            ),
            Framework(
                name="deepspeed-zero3",
                adapter=f"{_ROOM}.deepspeed:DeepSpeedZero3",
                what="DeepSpeed with ZeRO stage 3",
                environment="deepspeed",
            ),
            Framework(
                name="fabric",
                adapter=f"{_ROOM}.fabric:LightningFabric",
                what="Lightning Fabric with its strategy ddp",
                environment="fabric",
            ),
            Framework(
                name="accelerate",
                adapter=f"{_ROOM}.accelerate:HuggingFaceAccelerate",
                what="Hugging Face Accelerate",
                environment="accelerate",
            ),
            Framework(
                name="horovod",
                adapter=f"{_ROOM}.horovod:Horovod",
                what="Horovod on Gloo",
                environment="horovod",
            ),
            Framework(
                name="fairscale",
                adapter=f"{_ROOM}.fairscale:FairScale",
                what="FairScale's ShardedDataParallel with OSS (ZeRO stage 2)",
                environment="fairscale",
            ),
            Framework(
                name="ignite",
                adapter=f"{_ROOM}.ignite:Ignite",
                what="PyTorch-Ignite's idist.auto_model",
                environment="ignite",
            ),
            Framework(
                name="headway",
                adapter=f"{_ROOM}.headway_executor:HeadwayExecutor",
                what="headway's data parallelism, with default settings",
            ),
            Framework(
                name="headway-auto",
                adapter=f"{_ROOM}.headway_executor:HeadwayExecutor",
                what="headway by the plan that its search has chosen",
            ),
        )
    }
)
