"""Environments of the frameworks that headway is compared with: `headway compare --install`.

headway depends on none of them. Each gets a virtual environment of its own, which finds headway's
packages behind its own ones: so torch is the same for all, and is there once. Versions are pinned,
and none of headway's own packages can be replaced (they are pip's constraints). What a framework
needs beyond `pip install` stands with its pins as data, with the reason.

An environment is whole when its marker is written, which is the last thing that happens: what an
interrupted install has left is removed by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from headway.atomic_files import write_atomically
from headway.cache_folders import cache_folders
from headway.comparison.frameworks.registry import FRAMEWORKS
from headway.documents import nearest
from headway.errors import UsageError

Say = Callable[[str], None]

MARKER = "installed.txt"
LOG = "install.log"
PIP_SECONDS = 900.0
BUILD_SECONDS = 3600.0
"""Horovod takes 300 s of one core; slow cores that others use, too, may take ten times that."""
PROGRESS_SECONDS = 30.0
STALE_SECONDS = 60.0
"""torch holds the lock of a compiled extension for 0.3 s; older ones are of processes that died."""


@dataclass(frozen=True, kw_only=True)
class SourceEdit:
    """A change of a framework's source before it is built."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class SourceBuild:
    """How a framework is built that pip cannot install as it is.

    Attributes:
        tools: What the build imports, with versions.
        commands: Programs that must be there.
        edits: Of the source.
        variables: Of the build.
        minutes: What it took on one core of 2.5 GHz.
    """

    tools: tuple[str, ...]
    commands: tuple[str, ...]
    edits: tuple[SourceEdit, ...]
    variables: Mapping[str, str]
    minutes: int


@dataclass(frozen=True, kw_only=True)
class PinnedPackages:
    """A framework as it is installed.

    Attributes:
        package: Its name in the package index.
        dependencies: With versions; those that headway has itself stay as they are.
        module: What is imported to see that it works.
        build: For a framework that pip cannot install as it is.
        first_use: Code that has everything compiled that would be compiled at the first use.
        commands: Programs that `first_use` needs.
        variables: Of its processes; {environment} is the environment's folder.
    """

    package: str
    version: str
    dependencies: tuple[str, ...] = ()
    module: str
    build: SourceBuild | None = None
    first_use: str = ""
    commands: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


PINNED: Mapping[str, PinnedPackages] = MappingProxyType(
    {
        "accelerate": PinnedPackages(
            package="accelerate",
            version="1.15.0",
            dependencies=(
                "huggingface_hub==2.4.0",
                "psutil==7.2.2",
                "pyyaml==6.0.3",
                "safetensors==0.8.0",
            ),
            module="accelerate",
        ),
        "deepspeed": PinnedPackages(
            package="deepspeed",
            version="0.19.8",
            dependencies=(
                "einops==0.8.2",
                "hjson==3.1.0",
                "msgpack==1.2.4",
                "ninja==1.13.2",
                "psutil==7.2.2",
                "py-cpuinfo==9.0.0",
                "tqdm==4.70.1",
            ),
            module="deepspeed",
            # Its first `init_distributed` compiles an operator for 60 s without a word. A process
            # that dies meanwhile leaves a lock for which all later ones wait for ever.
            first_use="from deepspeed.comm.torch import build_shm_op\n"
            "assert build_shm_op() is not None, 'deepspeed_shm_comm was not built'",
            commands=("c++",),
            variables=MappingProxyType(
                {"TORCH_EXTENSIONS_DIR": "{environment}/extensions", "DS_ACCELERATOR": "cpu"}
            ),
        ),
        "fabric": PinnedPackages(
            package="lightning-fabric",
            version="2.6.6",
            dependencies=(
                "aiohappyeyeballs==2.7.1",
                "aiohttp==3.14.5",
                "aiosignal==1.4.0",
                "frozenlist==1.8.0",
                "lightning-utilities==0.15.3",
                "multidict==7.2.1",
                "propcache==0.5.4",
                "yarl==1.25.1",
            ),
            module="lightning_fabric",
        ),
        "fairscale": PinnedPackages(
            package="fairscale", version="0.4.13", module="fairscale.nn.data_parallel"
        ),
        "horovod": PinnedPackages(
            package="horovod",
            version="0.28.1",
            dependencies=("psutil==7.2.2", "pyyaml==6.0.3"),
            module="horovod.torch",
            build=SourceBuild(
                # From 82 on setuptools has no pkg_resources; 0.28.1 is of 2023.
                tools=("setuptools==80.9.0", "wheel==0.48.0"),
                commands=("cmake", "make", "c++"),
                edits=(
                    # It asks for C++14, and torch's headers refuse all before C++17 (since 2.1).
                    *(
                        SourceEdit(
                            file=file,
                            old="set(CMAKE_CXX_STANDARD 14)",
                            new="set(CMAKE_CXX_STANDARD 17)",
                        )
                        for file in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
                    ),
                    # Each set of processes, that of all included, opens its connections anew, and
                    # forgets HOROVOD_GLOO_IFACE: on nodes whose name is that of the loopback, as
                    # emulated ones are, the connections go there, and are refused.
                    SourceEdit(
                        file="horovod/common/gloo/gloo_context.cc",
                        old="  assert(global_context.IsEnabled());\n",
                        new="  gloo_iface_ = global_context.gloo_iface_;\n",
                    ),
                ),
                variables=MappingProxyType(
                    {
                        "HOROVOD_WITH_PYTORCH": "1",
                        "HOROVOD_WITHOUT_TENSORFLOW": "1",
                        "HOROVOD_WITHOUT_MXNET": "1",
                        "HOROVOD_WITH_GLOO": "1",
                        "HOROVOD_WITHOUT_MPI": "1",
                        # Eight compilers at once, its default, take 6 GB.
                        "MAKEFLAGS": "-j2",
                    }
                ),
                minutes=5,
            ),
        ),
        "ignite": PinnedPackages(
            package="pytorch-ignite", version="0.5.5", module="ignite.distributed"
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a framework runs.

    Attributes:
        python: The interpreter.
        variables: To be added to those of a process that runs in it.
    """

    python: Path
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment that is there.

    Attributes:
        seconds: That the install took.
        megabytes: Beyond headway's own environment.
        kept: It was there already.
    """

    name: str
    version: str
    seconds: float
    megabytes: float
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class NotInstalled:
    """An environment that could not be made, and why: the last lines of who gave up."""

    name: str
    why: str


def environments_folder(folder: Path | None = None) -> Path:
    """Where environments lie; None: in the user's cache folder."""
    # A virtual environment cannot be moved, and an interpreter is called by its whole path.
    return (cache_folders()[0] / "frameworks" if folder is None else folder).absolute()


def environments_of(names: Iterable[str]) -> list[str]:
    """The environments of frameworks, each once, in the order of the names; "all": all.

    Raises:
        UsageError: There is no such framework.
    """
    wanted: list[str] = []
    for name in names:
        if name == "all":
            wanted += PINNED
        elif name in PINNED:
            wanted.append(name)
        elif name in FRAMEWORKS:
            wanted += [FRAMEWORKS[name].environment] if FRAMEWORKS[name].environment else []
        else:
            legal = sorted({*PINNED, *FRAMEWORKS})
            raise UsageError(
                f"no framework {name!r} is known",
                fix=f"Did you mean {nearest(name, legal)!r}? There are {', '.join(legal)}; "
                "a framework of your own needs no environment from headway.",
            )
    return list(dict.fromkeys(wanted))


def find_environment(name: str, folder: Path | None = None) -> Environment | str:
    """An environment to run in, or why there is none.

    Args:
        name: As in `Framework.environment`; "": headway's own.
        folder: See `environments_folder`.
    """
    if not name:
        return Environment(python=Path(sys.executable))
    place = environments_folder(folder) / name
    marker = _read_marker(place)
    command = f"headway compare --install {name}"
    if folder is not None:
        command += f" --environments {folder}"
    if marker is None:
        return f"not installed: {command}"
    if marker.made_of != _made_of(PINNED[name]):
        return f"installed for other versions of headway's packages; again: {command}"
    # headway itself may lie in another folder than when this was installed.
    _link_packages(place)
    _remove_stale_locks(place)
    return _environment(name, place)


def install_environments(
    names: Iterable[str], folder: Path | None = None, say: Say = lambda text: None
) -> list[Installed | NotInstalled]:
    """Make the environments that are not there yet, one after the other.

    Args:
        names: See `environments_of`.
        folder: See `environments_folder`.
        say: Is told what is going on, a line at a time.

    Raises:
        UsageError: There is no such framework.
    """
    root = environments_folder(folder)
    return [_install(name, root, say) for name in environments_of(names)]


def _install(name: str, root: Path, say: Say) -> Installed | NotInstalled:
    pinned = PINNED[name]
    place = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{name}.lock"):
            marker = _read_marker(place)
            if marker is not None and marker.made_of == _made_of(pinned):
                return Installed(
                    name=name,
                    version=pinned.version,
                    seconds=marker.seconds,
                    megabytes=marker.megabytes,
                    kept=True,
                )
            began = time.monotonic()
            shutil.rmtree(place, ignore_errors=True)
            _Install(name, pinned, place, say).run()
            marker = _Marker(
                made_of=_made_of(pinned),
                seconds=time.monotonic() - began,
                megabytes=_megabytes(place),
            )
            _write_marker(place, marker)
    except _Failed as failed:
        return NotInstalled(name=name, why=str(failed))
    except OSError as error:
        return NotInstalled(name=name, why=f"{error.filename or place}: {error.strerror or error}")
    return Installed(
        name=name,
        version=pinned.version,
        seconds=marker.seconds,
        megabytes=marker.megabytes,
    )


class _Failed(Exception):
    """Why an environment cannot be made."""


@dataclass(frozen=True)
class _Install:
    """One environment in the making."""

    name: str
    pinned: PinnedPackages
    place: Path
    say: Say

    def run(self) -> None:
        """All steps but the marker.

        Raises:
            _Failed: One does not succeed.
        """
        build = self.pinned.build
        self._need(self.pinned.commands + (build.commands if build else ()))
        self.say(f"{self.name}: a virtual environment")
        self._call([sys.executable, "-m", "venv", str(self.place)], PIP_SECONDS)
        _link_packages(self.place)
        constraints = self.place / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in _constraints(self.pinned)))
        wanted = f"{self.pinned.package}=={self.pinned.version}"
        if build is not None:
            wanted = str(self._built(build, wanted))
        self.say(f"{self.name}: installing {self.pinned.package} {self.pinned.version}")
        self._pip("install", "--constraint", str(constraints), wanted)
        if self.pinned.first_use:
            self.say(f"{self.name}: compiling what it would compile at its first use")
            self._run(self.pinned.first_use, BUILD_SECONDS)
        self._check()

    def _need(self, commands: Sequence[str]) -> None:
        missing = [command for command in commands if shutil.which(command) is None]
        if missing:
            raise _Failed(f"{', '.join(missing)} not found, which compiles {self.pinned.package}")

    def _built(self, build: SourceBuild, wanted: str) -> Path:
        """The wheel; kept beside the environments, for the next one of the same making."""
        wheels = self.place.parent / "wheels" / f"{self.name}-{_made_of(self.pinned)}"
        found = sorted(wheels.glob("*.whl"))
        if found:
            return found[0]
        for old in wheels.parent.glob(f"{self.name}-*"):
            shutil.rmtree(old)
        self.say(f"{self.name}: building it takes about {build.minutes} minutes of one core")
        self._pip("install", *build.tools)
        source = self.place / "source"
        alone = ("--no-deps", "--no-build-isolation")
        self._pip("download", "--no-binary", ":all:", *alone, "--dest", str(source), wanted)
        for archive in sorted(source.glob("*.tar.gz")):
            with tarfile.open(archive) as tar:
                tar.extractall(source, filter="data")
        (unpacked,) = (folder for folder in source.iterdir() if folder.is_dir())
        for edit in build.edits:
            path = unpacked / edit.file
            text = path.read_text()
            if edit.old not in text:
                raise _Failed(f"{path} has no {edit.old!r}, which was to become {edit.new!r}")
            path.write_text(text.replace(edit.old, edit.new))
        command = ("wheel", "--verbose", *alone, "--wheel-dir", str(wheels), str(unpacked))
        self._pip(*command, seconds=BUILD_SECONDS, variables=build.variables)
        shutil.rmtree(source)
        return sorted(wheels.glob("*.whl"))[0]

    def _check(self) -> None:
        """It imports, and torch is headway's."""
        self._run(
            f"import torch\nimport {self.pinned.module}\n"
            f"assert torch.__version__ == {importlib.metadata.version('torch')!r}, "
            "f'torch is {torch.__version__} of {torch.__file__}, not that of headway'",
            PIP_SECONDS,
        )

    def _pip(
        self, *arguments: str, seconds: float = PIP_SECONDS, variables: Mapping[str, str] = {}
    ) -> None:
        python = str(_python(self.place))
        quiet = ("--no-input", "--disable-pip-version-check")
        command = [python, "-P", "-m", "pip", arguments[0], *quiet, *arguments[1:]]
        self._call(command, seconds, variables)

    def _run(self, code: str, seconds: float) -> None:
        environment = _environment(self.name, self.place)
        self._call([str(environment.python), "-P", "-c", code], seconds, environment.variables)

    def _call(
        self, command: Sequence[str], seconds: float, variables: Mapping[str, str] = {}
    ) -> None:
        """Run a command to its end, with its output in the log.

        Raises:
            _Failed: It fails or takes too long.
        """
        log = self.place.parent / f"{self.name}-{LOG}"
        assignments = [f"{name}={value}" for name, value in variables.items()]
        with log.open("ab") as output:
            before = output.tell()
            process = subprocess.Popen(
                ["env", *assignments, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the compilers, too, can be ended
            )
            try:
                self._wait(process, seconds)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode:
            raise _Failed(f"{_last_lines(log, before)}\n(all of it: {log})")

    def _wait(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            try:
                process.wait(min(PROGRESS_SECONDS, seconds - passed))
            except subprocess.TimeoutExpired:
                self.say(f"{self.name}: for {time.monotonic() - began:.0f} s now")
            else:
                return
        raise _Failed(f"not done after {seconds:.0f} s: {process.args!r}")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _Failed("another process is installing it at this moment") from None
        yield


def _python(place: Path) -> Path:
    return place / "bin" / "python"


def _site_packages(place: Path) -> Path:
    return place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _environment(name: str, place: Path) -> Environment:
    variables = {
        variable: value.format(environment=place)
        for variable, value in PINNED[name].variables.items()
    }
    # Programs that pip installs, such as ninja, are looked for by name.
    path = os.pathsep.join([str(place / "bin"), *os.get_exec_path()])
    return Environment(python=_python(place), variables={**variables, "PATH": path})


def _link_packages(place: Path) -> None:
    """Have its interpreter look for modules where headway and its packages are, last of all."""
    lines = "".join(f"{folder}\n" for folder in _folders_of("headway", "torch", "numpy"))
    path = _site_packages(place) / "headway.pth"
    if not path.exists() or path.read_text() != lines:
        path.write_text(lines)


def _folders_of(*modules: str) -> list[str]:
    """Folders in which this interpreter finds modules, each once."""
    specs = [importlib.util.find_spec(module) for module in modules]
    files = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(Path(file).parents[1]) for file in files))


def _constraints(pinned: PinnedPackages) -> list[str]:
    """What headway's environment has, in the versions that it has, and the pins of the rest."""
    present = {
        _normal(distribution.name): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    # headway itself may be installed from a folder, of which pip knows no version.
    del present["headway"]
    for name in ("pip", "setuptools", "wheel"):
        present.pop(name, None)
    rest = [line for line in pinned.dependencies if _normal(line.split("==")[0]) not in present]
    return sorted([*(f"{name}=={version}" for name, version in present.items()), *rest])


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


@dataclass(frozen=True)
class _Marker:
    made_of: str
    seconds: float
    megabytes: float


def _made_of(pinned: PinnedPackages) -> str:
    """A hash of all that an environment depends on."""
    parts = (repr(pinned), importlib.metadata.version("torch"), platform.python_version())
    text = "\n".join([*parts, sys.prefix, *_folders_of("torch", "numpy")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_marker(place: Path) -> _Marker | None:
    try:
        made_of, seconds, megabytes = (place / MARKER).read_text().split()
        return _Marker(made_of, float(seconds), float(megabytes))
    except (OSError, ValueError):
        return None


def _write_marker(place: Path, marker: _Marker) -> None:
    content = f"{marker.made_of}\n{marker.seconds:.1f}\n{marker.megabytes:.1f}\n"
    write_atomically(place / MARKER, content)


def _megabytes(place: Path) -> float:
    return sum(path.lstat().st_size for path in place.rglob("*") if not path.is_dir()) / 1e6


def _remove_stale_locks(place: Path) -> None:
    for lock in place.glob("extensions/*/lock"):
        try:
            if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                lock.unlink()
        except FileNotFoundError:
            continue


def _last_lines(log: Path, before: int, most: int = 8) -> str:
    """What matters of a command's output: a compiler's errors, or else the last lines."""
    with log.open("rb") as file:
        file.seek(before)
        text = file.read().decode("utf-8", "replace")
    lines = [line.rstrip()[:300] for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("WARNING:", "[notice]", "note:"))]
    errors = [line for line in lines if "error:" in line.lower()]
    return "\n".join(errors[:most] or lines[-most:]) or "it failed without a word"
