"""The stem: one process that has imported what test jobs import, and forks their Pythons.

A job is a dozen processes (driver, Ray's workers, vLLM's engines), each of which would import
torch, vLLM and DeepSpeed for ten seconds of a core. A Python that starts under `OPENRLHF_TEST_STEM`
hands its command line, environment and descriptors over (`hand_over`, from sitecustomize.py) and
waits; what the stem forks runs the command in its place. Either dies with the other. Commands that
the stem was not told of start as always.

    python stem.py SOCKET      prints "ready" after its imports; ends with its standard input
"""

import array
import contextlib
import ctypes
import importlib
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
import types

ADDRESS = "OPENRLHF_TEST_STEM"
IMPORTS = (
    "ray",
    "ray._private.workers.default_worker",
    "datasets",
    "deepspeed",
    "torch.utils.tensorboard",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "openrlhf.trainer.ppo_trainer_async",
    "openrlhf.trainer.ray.launcher",
    "openrlhf.trainer.ray.ppo_actor",
    "openrlhf.trainer.ray.ppo_critic",
    "openrlhf.trainer.ray.vllm_engine",
    "openrlhf.trainer.ray.vllm_worker_wrap",
    "openrlhf.models",
    "nereus_plugins.openrlhf.launch",
)
SCRIPTS = ("setup_worker.py", "default_worker.py", "driver.py")
CODE = ("multiprocessing.spawn", "multiprocessing.forkserver")
JOB = "01000000"
"""What a Ray calls its first job. Ray's library reads it when it is loaded: once, in the stem."""
_MOST_DESCRIPTORS = 64
"""More than a Python that hands itself over has open; chosen, not measured."""
_DRAWS = 64
"""More ids than a process of a test job draws at random; chosen, not measured."""


# --- In the Python that hands itself over ---------------------------------------------------------


def _wanted(argv):
    """Split a command line of Python into (script or None, code or None, arguments)."""
    words = list(argv[1:])
    while words and words[0].startswith("-") and words[0] != "-c":
        if words[0] in ("-m", "-X", "-W"):
            return None
        words.pop(0)
    if not words:
        return None
    if words[0] == "-c":
        code = words[1]
        return (None, code, words[2:]) if any(word in code for word in CODE) else None
    if os.path.basename(words[0]) in SCRIPTS:
        return words[0], None, words[1:]
    return None


def hand_over():
    """Let the stem run this process's command; returns only where it is none of the stem's."""
    found = _wanted(sys.orig_argv)
    if found is None or os.environ.get("RAY_JOB_ID", JOB) != JOB:
        return
    script, code, arguments = found
    own = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    own = [fd for fd in own if _is_open(fd)]
    with socket.socket(socket.AF_UNIX) as stem:
        stem.connect(os.environ[ADDRESS])
        request = pickle.dumps(
            {
                "script": script,
                "code": code,
                "arguments": arguments,
                "environment": dict(os.environ),
                "folder": os.getcwd(),
                "descriptors": own,
                "session": os.getsid(0) == os.getpid(),
            }
        )
        fds = array.array("i", own).tobytes()
        stem.sendmsg(
            [struct.pack("!I", len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
        )
        stem.sendall(request)
        for fd in own:
            if fd > 2:
                os.close(fd)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, _: stem.sendall(bytes([n])))
        answer = b""
        while len(answer) < 4:
            part = stem.recv(4 - len(answer))
            if not part:
                os._exit(70)  # the stem has ended
            answer += part
    (status,) = struct.unpack("!i", answer)
    if status < 0:  # as the kernel would report it
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# --- The stem -------------------------------------------------------------------------------------


def _received(connection):
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
    head, extra, _, _ = connection.recvmsg(4, space)
    (size,) = struct.unpack("!I", head)
    fds = array.array("i")
    for _, _, data in extra:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    request = b""
    while len(request) < size:
        if not (part := connection.recv(size - len(request))):
            raise EOFError
        request += part
    return pickle.loads(request), list(fds)


def _become(request, fds, number):
    """Take the place of whoever handed itself over, and run its command."""
    import fcntl

    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in fds]
    for name in os.listdir("/proc/self/fd"):
        if int(name) < 512:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for fd, at in zip(high, request["descriptors"], strict=True):
        os.dup2(fd, at, inheritable=True)
        os.close(fd)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    for name in set(os.environ) - set(request["environment"]):
        del os.environ[name]
    os.environ.update(request["environment"])
    random.seed()
    _draw_other_ids(number)
    for fd in range(3):
        if not _is_open(fd):
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    streams = [os.fdopen(fd, mode, 1, closefd=False) for fd, mode in enumerate("rww")]
    sys.stdin, sys.stdout, sys.stderr = streams
    importlib.import_module("sitecustomize").install_asked_for()
    if request["script"] is None:
        sys.argv = ["-c", *request["arguments"]]
        sys.path[0] = ""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
        return
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = os.path.dirname(os.path.abspath(request["script"]))
    main = types.ModuleType("__main__")
    main.__file__ = request["script"]
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    with open(request["script"], "rb") as source:
        exec(compile(source.read(), request["script"], "exec"), main.__dict__)


def _draw_other_ids(number):
    """Go on in Ray's random numbers to a place of one's own: forks would draw the same ids."""
    from ray import ObjectRef

    for _ in range(_DRAWS * number):
        ObjectRef.from_random()


def _run(request, fds, number):
    """Run a command as Python would; returns an exit code."""
    import threading
    import traceback

    try:
        _become(request, fds, number)
        code = 0
    except SystemExit as end:
        code = end.code
        if code is None:
            code = 0
        elif not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code & 0xFF


def main(path):
    answer = os.dup(1)  # for "ready" alone: what imports print goes to standard error
    os.dup2(2, 1)
    # That its raylet has died, a worker sees by its connection.
    os.environ["RAY_JOB_ID"], os.environ["RAY_RAYLET_PID"] = JOB, str(os.getpid())
    for name in IMPORTS:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:  # a lock that another thread holds would stay locked in every child
        print(f"the stem has {len(threads)} threads", file=sys.stderr)
    import gc

    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.write(answer, b"ready\n")
    os.close(answer)
    number = 0
    connections, pids = {}, {}  # descriptor -> (connection, pid); pid -> descriptor
    while True:
        ready, _, _ = select.select([0, listener, reader, *connections], [], [])
        if reader in ready:
            os.read(reader, 4096)
            _reap(connections, pids)
        for fd in ready:
            if fd in connections:
                connection, pid = connections[fd]
                with contextlib.suppress(OSError):
                    told = connection.recv(64)
                    with contextlib.suppress(ProcessLookupError):
                        for signum in told or [signal.SIGKILL]:
                            os.kill(pid, signum)
                    if told:
                        continue
                del connections[fd]
                connection.close()
        if listener in ready:
            connection, _ = listener.accept()
            try:
                request, fds = _received(connection)
            except (OSError, struct.error, EOFError):  # it ended before it had said what it wants
                connection.close()
                continue
            number += 1
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the stem
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os._exit(_run(request, fds, number))
            for fd in fds:
                os.close(fd)
            connections[connection.fileno()] = connection, pid
            pids[pid] = connection.fileno()
        if 0 in ready and not os.read(0, 1):
            for _, pid in connections.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return


def _reap(connections, pids):
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            fd = pids.pop(pid, None)
            connection, owner = connections.get(fd, (None, None))
            if owner == pid:
                with contextlib.suppress(OSError):
                    connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
                del connections[fd]
                connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
