"""ranks: a command that is forked from the warm process is what an interpreter would make of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from support.commands import command, environment, none_left, warm_variables
from support.patience import patient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is a warm process on Linux")

SAY = """
import json, os, sys
words = sys.argv, sys.path[0], __name__, sys.modules["__main__"].__dict__ is globals()
print(json.dumps([words, os.environ["WORD"], os.getcwd(), sys.stdin.read()]))
print("to standard error", file=sys.stderr)
"""
ENDS = {
    "at its end": "print('end', end='')",
    "by a number": "raise SystemExit(7)",
    "by a text": "raise SystemExit('no more')",
    "by an error": "import atexit; atexit.register(print, 'last'); 1 / 0",
    "by a signal": "import os; os.kill(os.getpid(), 15)",
    "by SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "by ^C": "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()",
}
FORM = {"file": ["say.py"], "module": ["-m", "say"], "text": ["-c", SAY]}


def run(words, cwd, variables, **options):
    variables = environment(**(variables or {}), WORD="so it is")
    return subprocess.run(
        words,
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=patient(60),
        **options,
    )


@pytest.mark.parametrize("form", FORM)
def test_words_folder_variables_and_files_are_those_of_the_caller(tmp_path, form):
    (tmp_path / "say.py").write_text(SAY)
    words = [*FORM[form], "one", "--two=3"]
    expected = run([sys.executable, *words], tmp_path, None, input="typed")
    found = run(["python", *words], tmp_path, warm_variables(), input="typed")
    assert expected.returncode == 0, expected.stderr
    assert (found.stdout, found.stderr) == (expected.stdout, expected.stderr)


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_it_would(tmp_path, end):
    expected = run([sys.executable, "-c", ENDS[end]], tmp_path, None)
    found = run(["python", "-c", ENDS[end]], tmp_path, warm_variables())
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_other_options_start_the_interpreter(tmp_path):
    words = ("-W", "error", "-c", "import sys; print('torch' in sys.modules, sys.warnoptions)")
    assert command("python", *words, cwd=tmp_path, variables=warm_variables()).out == (
        "False ['error']\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_client_reaches_the_command(tmp_path, number):
    code = "import os, time; os.open('mark', os.O_CREAT); open('ready', 'w'); time.sleep(60)"
    job = subprocess.Popen(
        ["python", "-c", code], cwd=tmp_path, env=environment(**warm_variables())
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline, "the command did not begin"
        time.sleep(0.01)
    job.send_signal(number)
    assert job.wait(timeout=patient(30)) == -number
    assert none_left(tmp_path)


def test_its_processes_are_forked_from_it_and_write_where_it_writes(tmp_path):
    (tmp_path / "many.py").write_text(
        "import multiprocessing, os, sys\n"
        "def work(number):\n"
        "    print('worker', number, 'torch' in sys.modules, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    for number in range(2):\n"
        "        process = context.Process(target=work, args=(number,))\n"
        "        process.start()\n"
        "        process.join()\n"
        "        assert process.exitcode == 0\n"
    )
    done = command("python", "many.py", cwd=tmp_path, variables=warm_variables())
    assert (done.code, done.err) == (0, "")
    assert done.out == "worker 0 True\nworker 1 True\n"


@pytest.mark.slow
def test_the_warm_process_ends_with_the_one_that_started_it(tmp_path):
    code = "from support.warm_commands import warm_path; import os; print(os.fspath(warm_path()))"
    done = command(sys.executable, "-c", code, cwd=tmp_path)
    assert done.code == 0, done.err
    assert not os.path.exists(done.out.strip())
