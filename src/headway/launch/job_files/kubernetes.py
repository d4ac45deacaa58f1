"""A recipe as a Kubernetes manifest: an Indexed Job, its Service, and the Secret of the job.

Each pod runs torchrun with the static rendezvous: pod 0 is the master, under the name that the
headless Service gives it, and the index of a pod is its node's rank. torchrun restarts ranks; the
kubelet restarts the container of a torchrun that failed. Each start resumes.

YAML 1.2 with texts in JSON's quotes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from headway.launch.job_files.request import LaunchRequest
from headway.launch.restart_policy import RESTARTS

YamlTree: TypeAlias = "Mapping[str, YamlTree] | list[YamlTree] | str | int | bool"

_ABOUT_SECRET = """\
# HEADWAY_SECRET belongs to this job alone: who knows it can speak as one of its pods. A new one:
# openssl rand -hex 32. Keep this file as you keep a password.
"""
PORT = 29500
INTERFACE = "eth0"
"""What container networks call a pod's interface."""
_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


def kubernetes_manifest(
    request: LaunchRequest, *, image: str, claim: str, secret: str, memory: str, cpus: int
) -> str:
    """The manifest of a job: three documents of YAML.

    Args:
        image: The container image, with headway and the recipe's module.
        claim: The persistent volume claim (ReadWriteMany), mounted at the run directory's parent.
        secret: HEADWAY_SECRET of the job.
        memory: Limit of a machine's pod, in Kubernetes' units.
        cpus: Limit of a machine's pod.
    """
    named = {"name": request.name}
    documents: list[dict[str, YamlTree]] = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": named,
            "stringData": {"HEADWAY_SECRET": secret},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": named,
            "spec": {
                "clusterIP": "None",
                # Pods meet before they are ready.
                "publishNotReadyAddresses": True,
                "selector": {"job-name": request.name},
                "ports": [{"name": "rendezvous", "port": PORT}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": named,
            "spec": {
                "completionMode": "Indexed",
                "completions": request.nodes,
                "parallelism": request.nodes,
                "backoffLimit": RESTARTS * request.nodes,
                "template": {"spec": _pod(request, image, claim, memory, cpus)},
            },
        },
    ]
    texts = ("\n".join(_yaml_lines(document)) + "\n" for document in documents)
    return _ABOUT_SECRET + "---\n".join(texts)


def _pod(request: LaunchRequest, image: str, claim: str, memory: str, cpus: int) -> YamlTree:
    limits: dict[str, YamlTree] = {"cpu": cpus, "memory": memory}
    if request.gpus:
        limits["nvidia.com/gpu"] = request.processes
    container: dict[str, YamlTree] = {
        "name": "train",
        "image": image,
        "command": ["sh", "-c", _shell_command(request)],
        "env": [
            {"name": "GLOO_SOCKET_IFNAME", "value": INTERFACE},
            {"name": "NCCL_SOCKET_IFNAME", "value": INTERFACE},
        ],
        "envFrom": [{"secretRef": {"name": request.name}}],
        "resources": {"requests": limits, "limits": limits},
        "volumeMounts": [
            {"name": "runs", "mountPath": str(request.directory.parent)},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "subdomain": request.name,
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            # Of loader processes; containers have 64 MiB otherwise.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _shell_command(request: LaunchRequest) -> str:
    torchrun = {
        "nnodes": request.nodes,
        "nproc-per-node": request.processes,
        "rdzv-backend": "static",
        "master-addr": f"{request.name}-0.{request.name}",
        "master-port": PORT,
        "max-restarts": RESTARTS,
    }
    words = [f"--{name}={value}" for name, value in torchrun.items()]
    return (
        f"mkdir -p {shlex.quote(str(request.directory))} && "
        f'exec torchrun {shlex.join(words)} --node-rank="$JOB_COMPLETION_INDEX" '
        f"-m headway {shlex.join(request.train_words)}"
    )


def _yaml_lines(tree: YamlTree, indent: str = "") -> Iterator[str]:
    """The lines of a document in block style."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = key if _PLAIN_KEY.fullmatch(key) else _scalar(key)
            if isinstance(value, Mapping | list):
                yield f"{indent}{name}:"
                yield from _yaml_lines(value, indent + "  ")
            else:
                yield f"{indent}{name}: {_scalar(value)}"
    elif isinstance(tree, list):
        for item in tree:
            if isinstance(item, Mapping | list):
                first, *rest = _yaml_lines(item, indent + "  ")
                yield f"{indent}- {first.lstrip()}"
                yield from rest
            else:
                yield f"{indent}- {_scalar(item)}"


def _scalar(value: Any) -> str:
    # Not as \\u escapes, whose surrogate pairs YAML does not have.
    return json.dumps(value, ensure_ascii=False)
