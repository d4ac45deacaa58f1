"""pure: rules of the house that a reader of the syntax tree can check."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import pytest

import headway

SOURCE = Path(headway.__file__).parent
FILES = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}

MUTABLE = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}
MUTATORS = {"append", "add", "update", "extend", "insert", "remove", "discard", "pop", "popitem"}
MUTATORS |= {"clear", "setdefault", "appendleft", "sort", "reverse"}


@cache
def walk(tree):
    """All nodes of a file, once for all rules."""
    return list(ast.walk(tree))


def dotted(node):
    """The text of a name, with its dots; `ast.unparse` takes a hundred times as long."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
        case ast.Call():
            return f"{dotted(node.func)}()"
        case _:
            return ast.unparse(node)


def reads_environment(tree):
    """Lines that touch the environment of the process."""
    found = []
    for node in walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            found += [node.lineno] * bool(names & {"environ", "environb", "getenv"})
    return found


def prints_or_exits(tree):
    """Lines that write to the terminal or end the process."""
    found = []
    for node in walk(tree):
        if isinstance(node, ast.Call):
            function = dotted(node.func)
            if function in {"print", "exit", "quit", "sys.exit", "SystemExit"}:
                found.append(node.lineno)
    return found


def swallows_import_errors(tree):
    """Lines of `except ImportError: pass` and of its spelling with `suppress`."""
    found = []
    for node in walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            silent = all(isinstance(inner, ast.Pass | ast.Continue) for inner in node.body)
            if silent and names & {"ImportError", "ModuleNotFoundError"}:
                found.append(node.lineno)
        if isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
            names = {n.id for a in node.args for n in ast.walk(a) if isinstance(n, ast.Name)}
            found += [node.lineno] * bool(names & {"ImportError", "ModuleNotFoundError"})
    return found


def is_mutable(value):
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    return isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] in MUTABLE


def module_state(tree):
    """Lines that make or change state of the module: `global`, variables, changed constants."""
    containers, found = set(), []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and is_mutable(node.value):
                containers.add(target.id)
                if not (target.id.isupper() or target.id == "__all__"):
                    found.append(node.lineno)
    for node in walk(tree):
        if isinstance(node, ast.Global):
            found.append(node.lineno)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if isinstance(node.value, ast.Name) and node.value.id in containers:
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in containers:
                found += [node.lineno] * (node.func.attr in MUTATORS)
    return found


MAKES_GROUPS = {"new_group", "init_process_group", "init_device_mesh", "DeviceMesh"}


def leaves_groups_listening(tree):
    """Lines that make a group of torch's whose socket goes on listening to strangers."""
    safe = {
        id(inner)
        for node in walk(tree)
        if isinstance(node, ast.With)
        and any("drop_later_connections" in ast.unparse(item) for item in node.items)
        for inner in ast.walk(node)
    }
    return [
        node.lineno
        for node in walk(tree)
        if isinstance(node, ast.Call)
        and dotted(node.func).split(".")[-1] in MAKES_GROUPS
        and id(node) not in safe
    ]


PICKLING = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
PICKLING |= {"send_object_list", "recv_object_list"}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def unpickles(tree):
    """Lines that run what another rank or a file says: torch's collectives of objects, and its
    checkpoints, which use them; pickles; `torch.load` of more than weights."""
    found = []
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom):
            names, module = {alias.name for alias in node.names}, node.module or ""
            bad = names & PICKLING or module.split(".")[0] in UNPICKLERS
            bad = bad or (module.endswith((".state_dict_saver", ".state_dict_loader")))
            found += [node.lineno] * bool(bad or (module == "torch" and "load" in names))
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            found += [node.lineno] * (name in PICKLING)
            text = dotted(node)
            found += [node.lineno] * (
                text.rpartition(".")[0] in UNPICKLERS and name != "dumps" and "Error" not in name
            )
        elif isinstance(node, ast.Call):
            weights = any(
                word.arg == "weights_only" and ast.unparse(word.value) == "True"
                for word in node.keywords
            )
            function = dotted(node.func)
            found += [node.lineno] * (function == "torch.load" and not weights)
            allowed = any(
                word.arg == "allow_pickle" and ast.unparse(word.value) != "False"
                for word in node.keywords
            )
            found += [node.lineno] * allowed
    return found


MAY_UNPICKLE = {
    "launch/local.py": "a worker's result, in the private directory of the process that started it",
    "run/recipe/sent_recipe.py": "a recipe, in the pipe to workers of the process that holds it",
    "comparison/worker.py": "a recipe, in the pipe to workers of the process that holds it",
    "svm/local_workers.py": "a kernel of the user's, in the pipe to workers of the same process",
    "horovod/functions.py": "a rank's object, signed with the job's secret and a session's token",
    "run/pipeline/batch_broadcast.py": "a batch of the user's types, signed with the job's secret",
}
"""File -> whose pickles it reads, and why they are the user's own."""


PARSERS = {"json", "tomllib", "yaml", "ast", "xml", "plistlib", "configparser"}
READ = {"loads", "load", "safe_load", "literal_eval", "fromstring", "parse", "JSONDecoder"}
# Of the syntax tree of the user's own code.
SOURCES = {"ast.parse"}


def parses_without_limits(tree):
    """Lines that parse texts with what recurses, or evaluate them; `headway.documents` does not."""
    found = []
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PARSERS:
            found += [node.lineno] * bool({alias.name for alias in node.names} & READ)
        elif isinstance(node, ast.Attribute) and node.attr in READ:
            text = dotted(node)
            found += [node.lineno] * (text.split(".")[0] in PARSERS and text not in SOURCES)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.lineno] * (node.func.id in {"eval", "exec"})
    return found


MAY_PARSE = {
    "documents.py": "the parsers with limits",
    "launch/namespaces.py": "what `ip` and `tc` print, which may have a key twice",
    "migration/configuration_file.py": "YAML, with limits of its own",
    "capture/benchmark/layer_algorithms.py": "torch's own trace, of this process and moment",
}
"""File -> what it parses without `parse_json` and `parse_toml`, and why it may."""


@cache
def parsed():
    """The tree of each file, once for all rules, which only read.

    Two million objects that stay: the collector would go through them again and again.
    """
    gc.disable()
    try:
        found = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
        for tree in found.values():
            walk(tree)
    finally:
        gc.freeze()
        gc.enable()
    return found


def broken(rule, *allowed):
    """Where a rule is broken, outside of the files and folders that may."""
    return [
        f"{name}:{line}"
        for name, tree in parsed().items()
        if not name.startswith(allowed)
        for line in rule(tree)
    ]


def test_the_environment_is_read_in_one_place():
    assert (
        broken(
            reads_environment,
            "ray.py",  # a launcher: it gives its workers their secret
            "run/distributed/launch_env.py",
            "launch/",
            "comparison/trial.py",  # a launcher of other frameworks
            "comm/backend/torch_compat.py",
            "channel/job_secret.py",
            "channel/gloo_listeners.py",
            "data/one_process.py",  # for readers of shards, which ask it; headway does not
        )
        == []
    )


def test_only_the_command_line_prints_and_exits():
    assert broken(prints_or_exits, "cli/", "__main__.py") == []


def test_no_import_error_is_swallowed():
    assert broken(swallows_import_errors, "\0") == []


def test_no_module_holds_state():
    assert broken(module_state, "\0") == []


def test_no_group_goes_on_listening():
    """Those of `_own_group` are of the backend "headway", which sees to it itself."""
    assert (
        broken(
            leaves_groups_listening,
            "run/distributed/device_mesh.py",
            "comparison/frameworks/",  # as the documentation of each framework has it
        )
        == []
    )


def test_nothing_is_unpickled_but_the_users_own():
    assert broken(unpickles, *MAY_UNPICKLE) == []


def test_texts_are_parsed_within_limits():
    assert broken(parses_without_limits, *MAY_PARSE) == []


def test_each_exception_is_needed():
    """A pickle is read in one line, which the reason is about."""
    assert [len(unpickles(parsed()[name])) for name in MAY_UNPICKLE] == [1] * len(MAY_UNPICKLE)
    assert all(parses_without_limits(parsed()[name]) for name in MAY_PARSE)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (unpickles, "dist.all_gather_object(found, own)"),
        (unpickles, "send = torch.distributed.broadcast_object_list"),
        (unpickles, "from torch.distributed import gather_object as gather"),
        (unpickles, "from torch.distributed.checkpoint.state_dict_saver import save"),
        (unpickles, "import pickle\npickle.load(file)"),
        (unpickles, "import pickle\nread = pickle.loads"),
        (unpickles, "pickle.Unpickler(file)"),
        (unpickles, "from pickle import loads"),
        (unpickles, "torch.load(path)"),
        (unpickles, "torch.load(path, weights_only=False)"),
        (unpickles, "np.load(path, allow_pickle=True)"),
        (leaves_groups_listening, "def f():\n    return dist.new_group([0])"),
        (parses_without_limits, "import json\njson.loads(text)"),
        (parses_without_limits, "from json import load as read"),
        (parses_without_limits, "read = tomllib.loads"),
        (parses_without_limits, "eval(text)"),
        (reads_environment, "import os\nos.environ['A']"),
        (reads_environment, "import os\nos.getenv('A')"),
        (reads_environment, "from os import path, environ"),
        (prints_or_exits, "def f():\n    print(1)"),
        (prints_or_exits, "import sys\nsys.exit(1)"),
        (prints_or_exits, "raise SystemExit(1)"),
        (swallows_import_errors, "try:\n    import a\nexcept ImportError:\n    pass"),
        (swallows_import_errors, "try:\n    import a\nexcept (ImportError, OSError):\n    pass"),
        (swallows_import_errors, "with contextlib.suppress(ImportError):\n    import a"),
        (module_state, "cache = {}"),
        (module_state, "seen: set[int] = set()"),
        (module_state, "NAMES = []\ndef f(x):\n    NAMES.append(x)"),
        (module_state, "NAMES = {}\ndef f(x):\n    NAMES[x] = 1"),
        (module_state, "x = 1\ndef f():\n    global x\n    x = 2"),
    ],
)
def test_each_rule_catches_what_it_forbids(rule, source):
    assert rule(ast.parse(source))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (reads_environment, "import os\nos.path.exists('environ')"),
        (prints_or_exits, "console.print(1)"),
        (parses_without_limits, "json.dumps(1)\nparse_json(text)\nmodel.eval()"),
        (unpickles, "import pickle\npickle.dumps(1)\ntorch.load(path, weights_only=True)"),
        (leaves_groups_listening, "with drop_later_connections():\n    a = dist.new_group([0])"),
        (
            swallows_import_errors,
            "try:\n    import a\nexcept ImportError:\n    raise X",
        ),
        (module_state, "NAMES = {'a': 1}\n__all__ = ['b']\ndef f(x):\n    y = []\n    y.append(x)"),
    ],
)
def test_no_rule_catches_what_is_allowed(rule, source):
    assert rule(ast.parse(source)) == []
