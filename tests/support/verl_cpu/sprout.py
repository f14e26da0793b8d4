"""sprout: what Ray starts in place of Python; a fork of the warm stem runs its worker (`stem`).

Run as ``python -I -S sprout.py SOCKET python-arguments...``. Where no stem answers, Python itself
is started, as if this file were not there.
"""

import json
import os
import socket
import sys


def main():
    path, *arguments = sys.argv[1:]
    arguments = [a for a in arguments if a != "-u"]
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(path)
        except OSError:
            os.execv(sys.executable, [sys.executable, *arguments])
        asked = {"arguments": arguments, "cwd": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(line, [json.dumps(asked).encode() + b"\n"], [0, 1, 2])
        code = line.recv(16)  # empty when the fork has ended without a word
    sys.exit(int(code or b"1"))


main()
