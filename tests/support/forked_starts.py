"""Fast starts: ``subprocess`` forks our Python programs from a process with all imports done.

Starting an interpreter and importing torch costs seconds of CPU time, and a full test run starts many hundreds. Each
worker of :mod:`tests.support.workers` therefore forks a template while it has no threads. For ``python -m elastic ...``
or ``python script.py`` the template forks a process that looks as if it had been started by ``exec``. It is a child of
the caller of ``Popen``. Its arguments, environment, directory, files, limits, signals and streams are those of a new
process, also in ``/proc``.

Other programs are started as usual, and so are ``-c`` and programs in another namespace. So are programs with other
values of variables that an interpreter or library reads at its start. Tests marked ``fresh_starts`` and runs without
``--forked-starts`` never fork a program.

Our commands that start other processes fork their own template. Agents detach themselves, so the worker's template
forks all agents.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
import io
import logging
import os
import pickle
import platform
import re
import resource
import runpy
import secrets
import select
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from tests.support import crashes

_ROOT = Path(__file__).parents[2]
_OURS = ("tieredckpt", "peerstore", "elastic", "integration", "benchmarks", "tests")
"""Packages whose modules run in a fork under ``-m``."""
_LAUNCHER = "torch.distributed.run"
_STARTERS = (
    "elastic", "integration.hyperpod.hyperpodrun", "integration.hyperpod.operator", "tests.support.patient_agent",
    _LAUNCHER,
)  # fmt: skip
"""Modules that start other processes and so need their own template."""
_IMPORTED = (
    "boto3", "elastic.cli", "elastic.coordinator.coordinator", "elastic.supervisor.supervisor", "fastapi", "fsspec",
    "numpy", "obstore", "peerstore.cli", "tieredckpt.agent.__main__", "tieredckpt.cli", "torch", "torch._dynamo",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", _LAUNCHER, "uvicorn",
)  # fmt: skip
_IMPORTED_ANEW = ("hyperpod_elastic_agent", "integration.hyperpod")
"""Modules that hold a socket or pid from their import, and modules that import those."""
_READ_AT_START = ("LD_", "MALLOC_", "GLIBC_", "PYTHON", "OMP_", "MKL_", "KMP_", "TORCH_", "ATEN_")
_READ_HERE = (
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_USE_COMM_NONBLOCKING",
)  # fmt: skip
_WRAPPER, _WRAPPER_BYTES = re.compile(rb'#!/bin/sh\nexec ([^\n]+) "\$@"\n'), 4096
_HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
"""Signals blocked in a template, and in its forks until the requested program runs."""
_LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
_LENGTH = struct.Struct("!I")
_HIGH = 500
_PR_SET_MM, _PR_SET_MM_MAP, _PR_SET_NAME = 35, 14, 15
_SYS_CLONE, _CLONE_PARENT, _CLONE_CHILD_TIDS = 56, 0x8000, 0x01200000
_TID_AT = 720
"""Offset of the thread ID in glibc's ``struct pthread``, in bytes."""

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_ulong
_libc.pthread_self.restype = ctypes.c_ulong
_libc.syscall.argtypes = [ctypes.c_long] * 6
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]


class ProcessStart(NamedTuple):
    """A request to start a process."""

    argv: list[str]
    environ: dict[str, str]
    folder: str
    files: list[int]
    """Descriptor numbers, in the new process, of the files sent with the request."""
    session: bool
    limits: list[tuple[int, int]]
    nice: int


class Program(NamedTuple):
    """A parsed command line of an interpreter."""

    module: str
    script: str
    words: list[str]
    isolated: bool
    """Whether neither its own folder nor ``PYTHONPATH`` is on ``sys.path``."""
    safe: bool
    """Whether its own folder is not on ``sys.path``."""
    quiet: bool

    @property
    def starts_others(self) -> bool:
        return any(self.module == one or self.module.startswith(f"{one}.") for one in _STARTERS)


# -- programs that can be forked ---------------------------------------------------------------------------------------


def parse_program(argv: Sequence[str]) -> Program | None:
    """Parse an interpreter's command line; return ``None`` for a program that cannot be forked."""
    if not argv or argv[0] != sys.executable:
        return None
    isolated = safe = quiet = False
    words = list(argv[1:])
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "-m":
            ours = bool(words) and (words[0].partition(".")[0] in _OURS or words[0] in _STARTERS)
            return Program(words[0], "", words[1:], isolated, safe, quiet) if ours else None
        if word in {"-I", "-S"}:
            isolated = True
        elif word == "-P":
            safe = True
        elif word == "-W" and words[:1] == ["ignore"]:
            quiet = bool(words.pop(0))
        elif word != "-u":
            return None
    if words and words[0].endswith(".py") and Path(words[0]).is_file():
        return Program("", words[0], words[1:], isolated, safe, quiet)
    return None


def expand_wrapper(argv: Sequence[str]) -> list[str]:
    """Return the command line that a shell script of the form ``exec COMMAND "$@"`` executes, or ``argv``."""
    if argv and argv[0].startswith("/") and argv[0] != sys.executable:
        with contextlib.suppress(OSError), open(argv[0], "rb") as file:  # noqa: PTH123 - only its first bytes are read
            if (found := _WRAPPER.fullmatch(file.read(_WRAPPER_BYTES))) is not None:
                return [*shlex.split(os.fsdecode(found[1])), *argv[1:]]
    return list(argv)


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k.startswith(_READ_AT_START) and k not in _READ_HERE}


def _namespaces_and_ids() -> tuple[int, ...]:
    """Return the namespaces and user IDs, which a fork inherits from the template."""
    spaces = (Path(f"/proc/thread-self/ns/{kind}").stat().st_ino for kind in ("net", "mnt", "pid", "user"))
    return (*spaces, os.geteuid(), os.getegid())


# -- the starting process ----------------------------------------------------------------------------------------------


class _TemplateState:
    """Templates of this process, inherited by its forks."""

    template: socket.socket | None = None
    owner = 0
    """Pid of the process whose children the template creates."""
    agents = ""
    """Abstract socket of the worker's template, for requests to start detached processes."""
    like: tuple[int, ...] = ()
    read_at_start: Mapping[str, str] = {}
    path: Sequence[str] = ()
    """``sys.path`` of a new interpreter, without the program's folder and ``PYTHONPATH``."""
    fresh = False
    """Whether to start every program as usual."""


_here = _TemplateState()
_asking = threading.Lock()
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_arguments = inspect.signature(_execute_child)


def _execute(self: subprocess.Popen[Any], *args: Any) -> None:
    given = _arguments.bind(self, *args).arguments
    if _here.fresh or not _start(self, given):
        _execute_child(self, *args)


def _start(process: Any, given: Mapping[str, Any]) -> bool:
    """Fork the program if possible; return whether it was forked."""
    if isinstance(given["args"], (str, bytes)) or not given["close_fds"] or not (_here.template or _here.agents):
        return False
    argv = expand_wrapper([os.fsdecode(word) for word in given["args"]])
    program = parse_program(argv)
    unusual = (
        given["preexec_fn"], given["shell"], given.get("gid"), given.get("gids"), given.get("uid"),
        given.get("umask", -1) >= 0, given.get("process_group", -1) >= 0, not given["restore_signals"],
        given["executable"] not in {None, sys.executable},
    )  # fmt: skip
    if program is None or any(unusual):
        return False
    environ = {
        os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if given["env"] is None else given["env"]).items()
    }
    folder = str(Path.cwd() / os.fsdecode(given["cwd"] or ""))
    if argv[0] != os.fsdecode(given["args"][0]):
        environ["PWD"] = folder  # as a shell exports it
    if not _matches_template(environ) or not Path(folder).is_dir():
        return False
    if argv[1:2] != ["-I"] and environ.get("OMP_NUM_THREADS", "1") != "1":
        return False
    std = [
        given[name] if given[name] >= 0 else number for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
    ]
    kept = sorted(int(fd) for fd in given["pass_fds"])
    detached = "--detach" in argv
    if not detached and (_here.template is None or _here.owner != os.getpid()):
        return False
    start = ProcessStart(
        argv, environ, folder, [0, 1, 2, *kept], bool(given["start_new_session"]),
        [resource.getrlimit(which) for which in _LIMITS], os.getpriority(os.PRIO_PROCESS, 0),
    )  # fmt: skip
    try:
        pid = _fork_detached_child(process, start, [*std, *kept]) if detached else _fork_child(start, [*std, *kept])
    except OSError:
        return False
    process.pid, process._child_created = pid, True
    process._close_pipe_fds(
        *(given[one] for one in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )
    return True


def _matches_template(environ: Mapping[str, str]) -> bool:
    """Return whether a fork of the template equals a process started here."""
    return _read_at_start(environ) == _here.read_at_start and _namespaces_and_ids() == _here.like


def _fork_child(start: ProcessStart, files: Sequence[int]) -> int:
    template = _here.template
    assert template is not None
    with _asking:
        _send(template, start, files)
        (pid,) = _LENGTH.unpack(_receive_exactly(template, _LENGTH.size))
    if not pid:
        raise OSError("it was not forked")
    return pid


def _fork_detached_child(process: Any, start: ProcessStart, files: Sequence[int]) -> int:
    """Fork a detached process; its parent, the template, reports its exit status."""
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(f"\0{_here.agents}")
        _send(end, start, files)
        (pid,) = _LENGTH.unpack(_receive_exactly(end, _LENGTH.size))
    except BaseException:
        end.close()
        raise
    this = weakref.ref(process)

    def try_wait(flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG and not select.select([end], [], [], 0)[0]:
            return 0, 0
        with end:
            return pid, _LENGTH.unpack(_receive_exactly(end, _LENGTH.size))[0]

    def poll(_deadstate: int | None = None, **_: Any) -> int | None:
        if (one := this()) is not None and one.returncode is None:
            found, status = try_wait(os.WNOHANG)
            if found:
                one._handle_exitstatus(status)
        return None if one is None else one.returncode

    process._try_wait, process._internal_poll = try_wait, poll
    return pid


def _send(end: socket.socket, start: ProcessStart, files: Sequence[int]) -> None:
    body = pickle.dumps(tuple(start))
    socket.send_fds(end, [_LENGTH.pack(len(body))], list(files))
    end.sendall(body)


def _receive(end: socket.socket) -> tuple[ProcessStart, list[int]]:
    """Receive a request and its files; raise :class:`EOFError` once the other side has closed."""
    head, files, *_ = socket.recv_fds(end, _LENGTH.size, 64)
    if not head:
        raise EOFError
    (size,) = _LENGTH.unpack(head + _receive_exactly(end, _LENGTH.size - len(head)))
    return ProcessStart(*pickle.loads(_receive_exactly(end, size))), files


def _receive_exactly(end: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = end.recv(size - len(found))
        if not part:
            raise ConnectionResetError("the template is gone")
        found += part
    return found


# -- templates ---------------------------------------------------------------------------------------------------------

_exits: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
"""Registered exit functions; forks run all except those of pytest and of tests."""
_register = atexit.register


def _record_exit_function(function: Callable[..., Any], /, *args: Any, **more: Any) -> Callable[..., Any]:
    _exits.append((function, args, more))
    return _register(function, *args, **more)


def _is_test_function(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in {"_pytest", "pytest", "tests", "hypothesis"}


def prepare() -> None:
    """Import the modules that forks share; call it once per session, before forking workers."""
    for name in _IMPORTED:
        importlib.import_module(name)
    _warm()
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import sys; print('\\0'.join(sys.path[1:]), end='')"]
    said = subprocess.run(command, env=plain, capture_output=True, text=True, check=True).stdout
    _here.path = said.split("\0")


def _warm() -> None:
    """Load the AWS SDK's data files, which it reads for its first client."""
    from tieredckpt.durable import s3

    s3.aws_session("").create_client("s3", region_name="us-east-1").close()


def install(*closed: Any) -> None:
    """Fork a template for this worker, which has no threads yet; the template closes ``closed``."""
    if (
        platform.machine() != "x86_64"
        or not _here.path
        or not _set_proc_cmdline(_arguments_of_this(), dict(os.environ))
    ):
        return
    _here.read_at_start, _here.like = _read_at_start(os.environ), _namespaces_and_ids()
    _here.agents = f"forked-starts-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{_here.agents}")
    listener.listen(64)
    subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]
    _fork_template(listener, *closed)
    listener.close()


def template_sockets() -> list[socket.socket]:
    """Return the sockets that a process forked by a worker must close."""
    return [_here.template] if _here.template is not None else []


def fork_template() -> None:
    """Fork a template for this forked worker, which starts programs and has no threads yet."""
    if _here.agents and not _here.fresh:
        _fork_template()


def _arguments_of_this() -> list[str]:
    return [os.fsdecode(word) for word in Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]]


def _fork_template(listener: socket.socket | None = None, *closed: Any) -> None:
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        _here.template, _here.owner = ours, os.getpid()
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        for one in closed:
            one.close()
        ours.close()
        _here.template = None
        kept = [end.detach() for end in (theirs, listener) if end is not None]
        _keep_only_files(
            [os.open(os.devnull, os.O_RDWR)] * 3 + kept, [0, 1, 2, *range(3, 3 + len(kept))], inheritable=False
        )
        _set_proc_cmdline(["template"], {})
        _forget_pytest()
        gc.collect()
        gc.freeze()
        gc.get_freeze_count = lambda: 1  # programs ask whether there are any; to count them takes 25 ms in each
        _serve(socket.socket(fileno=3), socket.socket(fileno=4) if listener is not None else None)
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _serve(end: socket.socket, listener: socket.socket | None) -> None:
    """Serve start requests until the process that owns this template ends."""
    selector = selectors.DefaultSelector()
    selector.register(end, selectors.EVENT_READ)
    if listener is not None:
        selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is end:
                start, files = _receive(end)
                pid = _fork_sibling()
                if pid == 0:
                    _become_program(start, files)
                end.sendall(_LENGTH.pack(max(pid, 0)))
                _close(files)
            elif key.fileobj is listener:
                with contextlib.suppress(OSError, EOFError):
                    _fork_detached(selector, listener.accept()[0])
            else:
                pid, asker = key.data
                _, status = os.waitpid(pid, 0)
                selector.unregister(key.fileobj)
                os.close(key.fd)
                with contextlib.suppress(OSError), asker:
                    asker.sendall(_LENGTH.pack(status))


def _fork_detached(selector: selectors.BaseSelector, asker: socket.socket) -> None:
    start, files = _receive(asker)
    pid = os.fork()
    if pid == 0:
        _become_program(start, files)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asker))
    asker.sendall(_LENGTH.pack(pid))
    _close(files)


def _close(files: Sequence[int]) -> None:
    for fd in files:
        os.close(fd)


def _fork_sibling() -> int:
    """Fork a child of this process's parent; return 0 in it. This works only in a single-threaded process."""
    ours = _libc.pthread_self() + _TID_AT
    known = ctypes.c_int.from_address(ours).value == os.getpid()
    ctypes.pythonapi.PyOS_BeforeFork()
    flags = _CLONE_PARENT | signal.SIGCHLD | (_CLONE_CHILD_TIDS if known else 0)
    pid = _libc.syscall(_SYS_CLONE, flags, 0, 0, ours if known else 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return int(pid)


def _forget_pytest() -> None:
    """Remove state of pytest and of tests that a new process would not have."""
    faulthandler.disable()
    atexit._clear()
    for function, args, more in _exits:
        if not _is_test_function(function):
            _register(function, *args, **more)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__, sys.__unraisablehook__, threading.__excepthook__,
    )  # fmt: skip
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    here, anew = str(_ROOT / "tests"), tuple(f"{one}." for one in _IMPORTED_ANEW)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        of_a_test = file and file.startswith(here) and name.partition(".")[0] != "tests"
        if of_a_test or f"{name}.".startswith(anew):
            del sys.modules[name]


# -- the started process -----------------------------------------------------------------------------------------------


class _ExecutedError(BaseException):
    """Raised by ``exec`` to run another program of ours in this process."""

    def __init__(self, program: Program, argv: Sequence[str]) -> None:
        self.program, self.argv = program, argv


def _become_program(start: ProcessStart, files: Sequence[int]) -> NoReturn:
    status = 1
    try:
        _keep_only_files(files, start.files, inheritable=True)
        if start.session:
            os.setsid()
        os.environ.clear()
        os.environ.update(start.environ)
        crashes.arm_crash_points()
        os.chdir(start.folder)
        for which, limits in zip(_LIMITS, start.limits, strict=True):
            if resource.getrlimit(which) != limits:
                resource.setrlimit(which, limits)
        if os.getpriority(os.PRIO_PROCESS, 0) != start.nice:
            os.setpriority(os.PRIO_PROCESS, 0, start.nice)
        tempfile.tempdir = None
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()
        argv: Sequence[str] = start.argv
        program = parse_program(argv)
        assert program is not None
        os.execv, os.execve = _execv, _execve  # type: ignore[assignment]
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        while True:
            _set_proc_cmdline(list(argv), dict(os.environ))
            _reopen_streams("-u" in argv[1:4])
            _fresh_main(program)
            _here.template = None
            if program.starts_others:
                _fork_template()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
            try:
                status = _run(program)
                break
            except _ExecutedError as another:
                program, argv = another.program, another.argv
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)


def _execv(path: str, argv: Sequence[str]) -> None:
    _execve(path, argv, None)


def _execve(path: str, argv: Sequence[str], environ: Mapping[str, str] | None) -> None:
    words = [os.fsdecode(word) for word in argv]
    program = parse_program(words)
    new = dict(os.environ if environ is None else environ)
    if (
        program is None
        or os.fsdecode(path) != sys.executable
        or new.get("OMP_NUM_THREADS", "1") != "1"
        or not _matches_template(new)
    ):
        _exec(path, argv, new)
        return
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    raise _ExecutedError(program, words)


_exec = os.execve


def _keep_only_files(files: Sequence[int], numbers: Sequence[int], *, inheritable: bool) -> None:
    """Keep only these files, under these numbers."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in files]
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names do
        if int(name) not in high:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number, inheritable=inheritable or number < 3)
        os.close(fd)


_kept: list[Any] = []


def _set_proc_cmdline(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Set this process's command line and environment in ``/proc``; return whether it succeeded."""
    areas = []
    for words in (argv, [f"{name}={value}" for name, value in environ.items()]):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        buffer = ctypes.create_string_buffer(text, len(text) + 1)
        _kept.append(buffer)
        areas += [ctypes.addressof(buffer), ctypes.addressof(buffer) + len(text)]
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code_and_data = [int(fields[number - 3]) for number in (26, 27, 45, 46, 47)]
    settings = struct.pack("=12Q2I", *code_and_data, _libc.sbrk(0), int(fields[28 - 3]), *areas, 0, 0, 0xFFFFFFFF)
    done: int = _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, settings, len(settings), 0)
    _libc.prctl(_PR_SET_NAME, ctypes.cast(ctypes.c_char_p(b"python"), ctypes.c_void_p).value, None, 0, 0)
    return done == 0


def _reopen_streams(unbuffered: bool) -> None:
    unbuffered = unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    given = io.BufferedReader(io.FileIO(0, closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(given, encoding="utf-8", errors="surrogateescape")  # type: ignore[misc]
    for number, name, errors in ((1, "stdout", "surrogateescape"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        buffer = raw if unbuffered else io.BufferedWriter(raw)
        text = io.TextIOWrapper(
            buffer,
            encoding="utf-8",
            errors=errors,
            line_buffering=number == 2 or raw.isatty(),
            write_through=unbuffered,
        )  # type: ignore[type-var]
        text.mode = "w"  # type: ignore[misc]
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _fresh_main(program: Program) -> None:
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    place = Path.cwd() if program.module else Path(program.script).resolve().parent
    first = "" if program.isolated or program.safe else str(place)
    added = [] if program.isolated else [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [*([first] if first else []), *added, *_here.path]
    sys.warnoptions[:] = ["ignore"] if program.quiet else []
    warnings.resetwarnings()
    for category in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    if program.quiet:
        warnings.simplefilter("ignore")


def _run(program: Program) -> int:
    try:
        if program.module:
            for name in (program.module, f"{program.module}.__main__"):
                if not hasattr(sys.modules.get(name), "__path__"):
                    sys.modules.pop(name, None)
            sys.argv = ["-m", *program.words]
            runpy._run_module_as_main(program.module)  # type: ignore[attr-defined]
        else:
            sys.argv = [program.script, *program.words]
            names = vars(sys.modules["__main__"])
            names.update(__file__=str(Path.cwd() / program.script), __spec__=None, __loader__=None, __cached__=None)
            exec(compile(Path(program.script).read_bytes(), program.script, "exec"), names)
    except _ExecutedError:
        raise
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status: int) -> NoReturn:
    try:
        with contextlib.suppress(BaseException):
            threading._shutdown()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
    finally:
        os._exit(status if status >= 0 else 1)


# -- pytest ------------------------------------------------------------------------------------------------------------

atexit.register = _record_exit_function  # before imported modules register exit functions


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("workers").addoption(
        "--forked-starts",
        action="store_true",
        help="Fork our programs instead of starting interpreters. Needs --workers.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fresh_starts: start programs with new interpreters, as a user does")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    _here.fresh = item.get_closest_marker("fresh_starts") is not None
    try:
        return (yield)
    finally:
        _here.fresh = False
