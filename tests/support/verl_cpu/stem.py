"""stem: a process that has imported what verl's processes import, and forks one for each.

A verl job on CPU is a dozen processes, each of which imports torch, transformers, tensordict and
Ray for five seconds of CPU time; on two cores that is most of a small job. Ray starts `sprout` in
place of Python (its own ``runtime_env.py_executable``), which asks this process for a fork. verl
itself, Nereus and what a test lets go wrong are imported after the fork, in the job's environment.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

MODULES = (
    "accelerate",
    "codetiming",
    "datasets",
    "fastapi",
    "hydra",
    "omegaconf",
    "pandas",
    "peft",
    "tensordict",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchdata.stateful_dataloader",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "uvicorn",
)
READY_S = 300
"""Until the stem has imported all that. Chosen, not measured."""
ASKED_S = 30
"""Until a process that has connected has said what it wants. Chosen, not measured."""
END_S = 30
"""Until the stem has ended when its input closes. Chosen, not measured."""


@contextmanager
def warm(folder, environment):
    """Run a stem; yields the command that Ray is to start workers with."""
    path = folder / "stem"
    with (folder / "stem.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_cpu.stem", str(path)],
            env=environment,
            stdin=subprocess.PIPE,  # it ends when this ends, however that comes about
            stdout=subprocess.PIPE,
            stderr=log,
        )
        alarm = threading.Timer(READY_S, process.kill)
        alarm.start()
        try:
            if process.stdout.readline() != b"ready\n":
                process.kill()  # of no effect on one that has ended
                code, said = process.wait(END_S), (folder / "stem.log").read_text()[-2000:]
                raise RuntimeError(
                    f"the stem of verl's processes was not ready within {READY_S} s; "
                    f"it ended with {code}: {said}"
                )
            alarm.cancel()
            yield f"{sys.executable} -I -S {Path(__file__).with_name('sprout.py')} {path}"
        finally:
            alarm.cancel()
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)
            process.stdout.close()


def serve(path):
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared with the forks stays shared
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    lines = {}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup_in, wakeup_out = os.pipe()
    os.set_blocking(wakeup_out, False)
    signal.set_wakeup_fd(wakeup_out)
    print("ready", flush=True)
    import select

    while True:
        ready, _, _ = select.select([listener, wakeup_in, 0], [], [])
        if 0 in ready:
            return  # the test session is over
        if wakeup_in in ready:
            os.read(wakeup_in, 4096)
            _reap(lines)
        if listener in ready:
            line, _ = listener.accept()
            line.settimeout(ASKED_S)
            data, fds = _asked(line)
            if data.endswith(b"\n"):
                lines[_fork(data, fds, line, listener)] = line
            else:
                line.close()  # whoever it was has ended, or says nothing
            for fd in fds:
                os.close(fd)


def _reap(lines):
    while lines:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with suppress(OSError), lines.pop(pid) as line:
            line.send(str(os.waitstatus_to_exitcode(status) & 0xFF).encode())


def _asked(line):
    """Return a request and its files; one without an end where the other side has gone."""
    data, fds = b"", []
    with suppress(OSError):
        while not data.endswith(b"\n"):
            more, received, _, _ = socket.recv_fds(line, 1 << 20, 3)
            data, fds = data + more, fds + received
            if not more:
                break
    return data, fds


def _fork(data, fds, line, listener):
    stem = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: none outlives the stem
    if os.getppid() != stem:
        os._exit(1)
    os.setsid()  # raylet ends whole process groups
    listener.close()
    asked = json.loads(data)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    line.close()
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["cwd"])
    script, *arguments = asked["arguments"]
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
