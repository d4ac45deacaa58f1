"""In the place of `python`, `headway` or `torchrun`: the warm process runs the command instead.

python -IS warm_client.py SOCKET KIND WORD...

Hands over words, variables, folder and the three open files; signals pass on; ends as the command
ends. It imports next to nothing: it is to take hundredths of a second.
"""

import marshal
import os
import signal
import socket
import sys

PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ask(path, kind, words):
    """How the command ended: its exit code, or minus the signal that killed it."""
    request = marshal.dumps((kind, words, dict(os.environ), os.getcwd()))
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        for number in PASSED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda passed, _: line.sendall(bytes([passed])))
        socket.send_fds(line, [len(request).to_bytes(8, "big")], [0, 1, 2])
        line.sendall(request)
        answer = line.recv(4)
    if len(answer) < 4:
        sys.exit("the warm process has ended")
    return int.from_bytes(answer, "big", signed=True)


def end(code):
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    end(ask(sys.argv[1], sys.argv[2], sys.argv[3:]))
