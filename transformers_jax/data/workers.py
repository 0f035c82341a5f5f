"""Worker processes that read a dataset: for work that threads cannot share, such as decoding and changing pictures.

grain's own (`mp_prefetch`) stay behind when the main process is killed, with the shared memory they filled, need more
of it than containers often have, and import the main program again. Here a process has nothing but a socket to the main
one: it answers numbers with examples, and ends when the other end is gone, however that came about. Every index gives
the same value in every process, so their number changes nothing but the time.
"""

import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import traceback
import weakref
from collections.abc import Sequence
from typing import Any, SupportsIndex

import cloudpickle
import numpy as np

START = "import sys; sys.path[:] = {path!r}; from transformers_jax.data.workers import serve; serve({descriptor})"


class WorkerProcesses:
    """The values of `dataset`, which has a length and random access, computed by `count` processes of their own.

    Threads may ask for several at once. An exception in a process is raised here as it was there, with the traceback as
    a note; a process that dies is a `ChildProcessError`. Raises `ValueError` for a dataset that cannot be pickled
    (cloudpickle's way: functions of the main program go along). The processes end with this object, or with this
    process.
    """

    def __init__(self, dataset: Any, count: int):
        self._length = len(dataset)
        try:
            pickled = cloudpickle.dumps(dataset)
        except Exception as error:
            raise ValueError(f"this data cannot be sent to worker processes ({error}); use 0 of them") from error
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        workers = [_Worker(pickled) for _ in range(count)]
        self._end = weakref.finalize(self, _end, workers)
        for worker in workers:
            self._free.put(worker)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex) -> Any:
        worker = self._free.get()
        try:
            return worker.ask(int(index))
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End the processes now."""
        self._end()


class _Worker:
    def __init__(self, dataset: bytes):
        self.unsent = [dataset]  # it goes with the first request, for which nobody in a hurry waits
        self.socket, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", START.format(path=sys.path, descriptor=descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                # Ctrl-C in a terminal is for the main process, which decides what becomes of this one.
                start_new_session=True,
                # The devices are the main process's.
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )

    def ask(self, index: int) -> Any:
        try:
            while self.unsent:
                _send(self.socket, [self.unsent.pop()])
            _send(self.socket, [struct.pack("<q", index)])
            head, *buffers = _receive(self.socket)
        except (OSError, EOFError):
            raise self._died() from None
        value, error = pickle.loads(head, buffers=buffers)
        if error is not None:
            raise error
        return value

    def _died(self) -> ChildProcessError:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return ChildProcessError(f"worker process {self.process.pid} of the data pipeline stopped answering")
        how = f"with code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        hint = "; if memory ran out, use fewer processes or a smaller prefetch" if code == -signal.SIGKILL else ""
        return ChildProcessError(f"worker process {self.process.pid} of the data pipeline ended early, {how}{hint}")


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()  # it has nothing to put in order
    for worker in workers:
        worker.process.wait()
        worker.socket.close()


def serve(descriptor: int) -> None:
    """What a worker process does: take the dataset, then answer each index with its value or an exception."""
    with socket.socket(fileno=descriptor) as connection:
        try:
            (pickled,) = _receive(connection)
            dataset: Any = None
            while True:
                (request,) = _receive(connection)
                buffers: list[pickle.PickleBuffer] = []
                try:
                    dataset = pickle.loads(pickled) if dataset is None else dataset
                    answer = (dataset[struct.unpack("<q", request)[0]], None)
                    head = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
                except Exception as error:
                    buffers = []
                    head = pickle.dumps((None, _portable(error)))
                _send(connection, [head, *(buffer.raw() for buffer in buffers)])
        except (OSError, EOFError):
            return  # the main process is gone, or wants no more


def _portable(error: Exception) -> Exception:
    error.add_note(f"In a worker process:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _send(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    sizes = [len(part) for part in parts]
    connection.sendall(struct.pack(f"<{len(parts) + 1}Q", len(parts), *sizes))
    for part in parts:
        connection.sendall(part)


def _receive(connection: socket.socket) -> list[memoryview]:
    (count,) = struct.unpack("<Q", _read(connection, 8))
    sizes = struct.unpack(f"<{count}Q", _read(connection, 8 * count))
    return [_read(connection, size) for size in sizes]


def _read(connection: socket.socket, size: int) -> memoryview:
    # Straight into memory that the arrays keep; np.empty, unlike bytearray, does not fill it first.
    buffer = np.empty(size, np.uint8).data
    done = 0
    while done < size:
        received = connection.recv_into(buffer[done:], size - done, socket.MSG_WAITALL)
        if not received:
            raise EOFError
        done += received
    return buffer
