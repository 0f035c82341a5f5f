"""The processes of one run know of each other: they meet, exchange small values, stop together, and none outlives one
that dies.

Every process holds one connection to process 0, which passes on what it hears. The system closes a connection when its
process ends, however that came about, so the others learn of it at once and can say so; JAX's own heartbeats take
longer and end a process by an abort. None of this touches a device: a process may wait here for as long as another
one prepares its data.
"""

import contextlib
import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

GREETING = "transformers_jax"
GRACE = 10.0
"""Seconds in which the others end after an error, and in which a process that failed may say why."""


class LostProcessError(ConnectionError):
    """Another process of the run ended."""


KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ValueError, TimeoutError, LostProcessError)}


def meet(address: str, index: int, count: int, *, timeout: float, heartbeat: float) -> "Peers":
    """Wait for all `count` processes at `address`, "host:port", where process 0 listens; this one is process `index`.

    Raises `TimeoutError` after `timeout` seconds, `LostProcessError` where a process ends meanwhile, `ValueError` where
    they were told different things. The port is free again when this returns. From then on a machine that is gone is
    noticed after `heartbeat` seconds, a process that ends at once.
    """
    deadline = time.monotonic() + timeout
    me = {"greeting": GREETING, "process": index, "processes": count, "jax": jax.__version__}
    if index > 0:
        return Peers(index, count, _join(address, me, timeout, deadline, heartbeat))
    lines = _receive_all(address, me, timeout, deadline, heartbeat)
    ours, hubs = map(_Line, socket.socketpair())
    threading.Thread(target=_Hub([hubs, *lines]).run, name="hub", daemon=True).start()
    return Peers(index, count, ours)


class Peers:
    """This process among the others. `saved` is the newest checkpoint, of which the last words speak."""

    def __init__(self, index: int, count: int, line: "_Line"):
        self.index, self.count = index, count
        self.saved: int | None = None
        self._line = line
        self._values: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # closed while the processes agree where to stop
        self._calls, self._stop_at = 0, None
        self._leaving, self._failed, self._over = False, False, threading.Event()
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def exchange(self, value: Any) -> list[Any]:
        """The values (JSON) of all processes, in their order. All call this, the same number of times."""
        self._line.send({"value": value})
        return self._values.get()

    def ask_to_stop(self) -> None:
        """Have `stopped` return True in all processes, at the same call."""
        self._line.send({"stop": True})

    def stopped(self) -> bool:
        """Whether it is time to stop. All processes call this, after each step."""
        with self._gate:
            self._calls += 1
            return self._stop_at is not None and self._calls >= self._stop_at

    def fail(self, message: str, code: int) -> None:
        """End all other processes with this message and exit code, then this one `GRACE` seconds later at most."""
        self._failed = True
        with contextlib.suppress(OSError):
            self._line.send({"error": f"process {self.index} of {self.count}: {message}", "code": code})
        self._over.wait(GRACE)
        timer = threading.Timer(GRACE, os._exit, [code])  # what is left to do may wait for those that are gone
        timer.daemon = True
        timer.start()

    def wait_for_the_cause(self) -> None:
        """After a collective failed: the end of another process, which is why, is heard within moments and ends this
        one."""
        self._over.wait(3.0)

    def leave(self) -> None:
        """Wait for all processes, and part from them without an alarm."""
        self.exchange(None)
        self._leaving = True
        with contextlib.suppress(OSError):
            self._line.send({"bye": True})

    def _listen(self) -> None:
        for message in self._line.messages():
            if "values" in message:
                self._values.put(message["values"])
            elif "agree" in message:
                self._gate.acquire()
                self._line.send({"calls": self._calls})
            elif "stop_at" in message:
                self._stop_at = message["stop_at"]
                self._gate.release()
            elif "lost" in message:
                self._end(self._last_words(message["lost"]), 1)
            elif "end" in message:
                self._end(message["end"], message["code"])
        if not self._leaving:
            self._end(self._last_words(0), 1)

    def _last_words(self, lost: int) -> str:
        start = "from the beginning" if self.saved is None else f"from step {self.saved}"
        return (
            f"process {lost} of {self.count} ended without a word (killed, out of memory, or its machine is gone), so "
            f"process {self.index} ends too; start the same command again to continue {start}"
        )

    def _end(self, message: str, code: int) -> None:
        self._over.set()
        if not self._failed:  # otherwise this process has words of its own
            # The main thread may wait in a collective for the one that is gone: it cannot be asked to end.
            os.write(2, f"error: {message}\n".encode())
            os._exit(code)


class _Line:
    """Messages, one JSON object a line, over a socket."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._sending, self._received = threading.Lock(), b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come, after waiting for something; None where the other end is gone. Raises ValueError
        for what is none."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            raise
        except OSError:
            return None
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"{messages} are not all messages")
        return messages

    def messages(self) -> Iterator[dict[str, Any]]:
        while (messages := self.read()) is not None:
            yield from messages


class _Hub:
    """What process 0 does for all: collect, decide, pass on."""

    def __init__(self, lines: list[_Line]):
        self.lines, self.left = lines, set[int]()
        self.values: list[list[Any]] = [[] for _ in lines]
        self.calls: dict[int, int] | None = None

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, line in enumerate(self.lines):
                selector.register(line, selectors.EVENT_READ, index)
            while len(self.left) < len(self.lines):
                for key, _ in selector.select():
                    index, line = key.data, self.lines[key.data]
                    if (messages := line.read()) is None:
                        selector.unregister(line)
                        if index not in self.left:
                            return self.end({"lost": index}, selector)
                    for message in messages or ():
                        if "error" in message:
                            return self.end({"end": message["error"], "code": message["code"]}, selector)
                        self.hear(index, message)

    def hear(self, index: int, message: dict[str, Any]) -> None:
        if "value" in message:
            self.values[index].append(message["value"])
            if all(self.values):
                self.tell({"values": [values.pop(0) for values in self.values]})
        elif "bye" in message:
            self.left.add(index)
        elif "stop" in message and self.calls is None:
            self.calls = {}
            self.tell({"agree": True})
        elif "calls" in message and self.calls is not None:
            self.calls[index] = message["calls"]
            if len(self.calls) == len(self.lines):
                self.tell({"stop_at": max(self.calls.values()) + 1})

    def tell(self, message: dict[str, Any], *, first: int = 0) -> None:
        for line in self.lines[first:]:
            with contextlib.suppress(OSError):  # it is gone, which the loop hears next
                line.send(message)

    def end(self, message: dict[str, Any], selector: selectors.BaseSelector) -> None:
        """Process 0 last: JAX ends the others by an abort when it goes."""
        self.tell(message, first=1)
        selector.unregister(self.lines[0])
        deadline = time.monotonic() + GRACE / 2
        while len(selector.get_map()) and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if self.lines[key.data].read() is None:
                    selector.unregister(key.fileobj)
        self.lines[0].send(message)


def _join(address: str, me: dict[str, Any], timeout: float, deadline: float, heartbeat: float) -> _Line:
    host, port = split_address(address)
    who = f"process {me['process']} of {me['processes']}"
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic())))
            if connection.getsockname() != connection.getpeername():  # a port that nobody listens on may meet itself
                break
            connection.close()
            reason = "nobody listens there"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{who} did not reach the coordinator at {address} within {timeout:g} s ({reason}); process 0 must run "
                "on that machine and be started at the same time, and its port be open"
            )
        time.sleep(0.2)
    _keep_alive(connection, heartbeat)
    line = _Line(connection)
    answer: dict[str, Any] | None = None
    try:
        line.send(me)
        connection.settimeout(max(1.0, deadline - time.monotonic() + GRACE))  # process 0 knows who is missing
        answer = next(line.messages(), None)
    except TimeoutError:
        raise TimeoutError(
            f"{who} reached the coordinator at {address}, but not all processes came within {timeout:g} s"
        ) from None
    except (OSError, ValueError):
        pass
    if answer is None or ("go" not in answer and "end" not in answer):
        raise LostProcessError(f"process 0 ended while {who} was starting, or another program listens at {address}")
    if "end" in answer:
        raise KINDS[answer["kind"]](answer["end"])
    connection.settimeout(None)
    return line


def _receive_all(address: str, me: dict[str, Any], timeout: float, deadline: float, heartbeat: float) -> list[_Line]:
    """Lines to the processes 1, 2, ..."""
    _, port = split_address(address)
    count = me["processes"]
    lines: dict[int, _Line] = {}
    with _listener(port) as listener:
        try:
            while len(lines) < count - 1:
                if (left := deadline - time.monotonic()) <= 0:
                    missing = sorted(set(range(1, count)) - set(lines))
                    listed = ", ".join(map(str, missing[:20])) + (" ..." if len(missing) > 20 else "")
                    raise TimeoutError(
                        f"{count - len(missing)} of {count} processes came to {address} within {timeout:g} s; missing: "
                        f"process {listed}. Are they started, with this coordinator?"
                    )
                for index, line in lines.items():
                    if _is_closed(line.socket):
                        raise LostProcessError(f"process {index} of {count} ended while the others were starting")
                listener.settimeout(min(left, 0.5))
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    _keep_alive(connection, heartbeat)
                    if (line := _Line(connection)) and (index := _greeted(line, me, lines)) is not None:
                        lines[index] = line
        except Exception as error:
            for line in lines.values():
                with contextlib.suppress(OSError):
                    line.send({"end": str(error), "kind": type(error).__name__})
            raise
    for index in range(1, count):
        with contextlib.suppress(OSError):  # it is gone, which the hub hears
            lines[index].send({"go": True})
    return [lines[index] for index in range(1, count)]


def _greeted(line: _Line, me: dict[str, Any], lines: dict[int, _Line]) -> int | None:
    """The number of a process that greets properly, None for anybody else."""
    line.socket.settimeout(2.0)
    try:
        told = next(line.messages(), None)
    except (OSError, ValueError):
        told = None
    line.socket.settimeout(None)
    if told is None or told.get("greeting") != GREETING or not isinstance(told.get("process"), int):
        line.socket.close()
        return None
    index, wrong = told["process"], None
    for name, what in (("processes", "processes"), ("jax", "as version of jax")):
        if told.get(name) != me[name]:
            wrong = f"process {index} says {told.get(name)} {what}, process 0 says {me[name]}; start all alike"
    if index in lines or not 0 < index < me["processes"]:
        wrong = wrong or f"two processes are process {index} of {me['processes']}; give each a number of its own"
    if wrong:
        lines[index if index not in lines else -1] = line  # to be told, too
        raise ValueError(wrong)
    return index


def _listener(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    deadline = time.monotonic() + GRACE  # a run that is ending may hold it
    while True:
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=1024
            )
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"process 0 cannot listen at port {port}: {error.strerror}; choose another port for the coordinator"
                ) from None
            time.sleep(0.5)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port". Raises `ValueError` for anything else."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or " " in host:
        raise ValueError(f"the coordinator {address!r} is not HOST:PORT, such as 10.0.0.1:8476")
    return host, int(port)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _keep_alive(connection: socket.socket, seconds: float) -> None:
    """Have the system give a connection up when the other machine does not answer for so long."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    part = max(1, int(seconds / 6))
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    times = {idle: 3 * part, "TCP_KEEPINTVL": part, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": int(1000 * seconds)}
    for name, value in times.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
