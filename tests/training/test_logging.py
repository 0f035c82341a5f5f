"""metrics.jsonl is always readable, also after a kill; the bar is cheap and nothing breaks it."""

import json
import os
import pty
import re
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from transformers_jax.training.logging import MetricsLogger, format_count, format_duration

REPOSITORY = Path(__file__).resolve().parents[2]


def strict_lines(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_log_is_one_line_of_json_at_once(tmp_path):
    with MetricsLogger(tmp_path / "run", total_steps=10, console="none") as logger:
        logger.log(0, {"loss": jnp.float32(1.5), "learning_rate": np.float64(1e-3), "count": np.int64(3), "phase": "a"})
        assert strict_lines(logger.path) == [{"step": 0, "loss": 1.5, "learning_rate": 1e-3, "count": 3, "phase": "a"}]
        logger.log(1, {"eval/loss": 2.0})
        assert strict_lines(logger.path)[1] == {"step": 1, "eval/loss": 2.0}


def test_numbers_that_json_does_not_have_are_null_and_named(tmp_path):
    with MetricsLogger(tmp_path, total_steps=10, console="none") as logger:
        logger.log(3, {"loss": float("nan"), "grad_norm": jnp.float32(jnp.inf), "learning_rate": 1.0})
    assert strict_lines(tmp_path / "metrics.jsonl") == [
        {
            "step": 3, "loss": None, "grad_norm": None, "learning_rate": 1.0,
            "non_finite": {"loss": "nan", "grad_norm": "inf"},
        }
    ]  # fmt: skip


def test_a_resumed_run_continues_the_file_without_doubles(tmp_path):
    with MetricsLogger(tmp_path, total_steps=10, console="none") as logger:
        for step in range(1, 8):
            logger.log(step, {"loss": float(step)})
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 8, "lo')  # killed in the middle of a line
    with MetricsLogger(tmp_path, total_steps=10, console="none") as logger:
        logger.truncate(5)
        assert [line["step"] for line in strict_lines(file)] == [1, 2, 3, 4, 5]
        logger.log(6, {"loss": 0.0})
    assert [line["step"] for line in strict_lines(file)] == [1, 2, 3, 4, 5, 6]
    assert strict_lines(file)[-1]["loss"] == 0.0
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", [b'{"step": 2, "lo', b'{"step": 2}'])
def test_a_torn_last_line_never_spoils_the_next_one(tmp_path, tail):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + tail)
    with MetricsLogger(tmp_path, total_steps=10, console="none") as logger:
        logger.log(2, {"loss": 1.0})
    assert strict_lines(file) == [{"step": 1}, {"step": 2, "loss": 1.0}]


def test_nothing_is_written_or_shown_where_not_enabled(tmp_path, capsys):
    with MetricsLogger(tmp_path / "run", total_steps=10, enabled=False) as logger:
        logger.truncate(0)
        logger.print_summary({"parameters": 3})
        logger.update(1)
        logger.log(1, {"loss": 1.0})
        logger.print("hello")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    with MetricsLogger(tmp_path, total_steps=2000) as logger:
        logger.print_summary({"parameters": 124_439_808, "tokens per step": 768, "devices": "8 x cpu"}, title="GPT")
        logger.log(1, {"loss": 4.17431, "learning_rate": 1e-5, "grad_norm": 1.0})
        logger.update(2)
        logger._clock = (1, logger._clock[1] - 11.0)
        rates = {"tokens_per_second": 12345.6, "tokens_per_second_per_device": 1543.2, "mfu": 0.4127}
        logger.log(101, {"loss": 2.5, "learning_rate": 6e-4} | rates)
        logger.log(250, {"eval/loss": 1.8, "eval/perplexity": 6.05})
        logger.print("text with [brackets] and a very long line " + "x" * 200)
    out = capsys.readouterr().out.splitlines()
    assert out[:4] == ["GPT", "parameters       124.4 M", "tokens per step  768", "devices          8 x cpu"]
    assert out[4] == "step 1/2,000  loss 4.1743  lr 1.00e-05"
    assert re.fullmatch(r"step 101/2,000  loss 2.5000  lr 6.00e-04  12.3 k tokens/s  MFU 41.3%  3:\d\d left", out[5])
    assert out[6] == "step 250/2,000  eval/loss 1.8000  eval/perplexity 6.0500"
    assert out[7].startswith("text with [brackets]") and len(out[7]) > 200 and len(out) == 8


def test_the_bar_on_a_terminal_is_cheap_and_survives_messages(tmp_path):
    script = f"""
        import logging, sys, time
        sys.path.insert(0, {str(REPOSITORY)!r})
        from transformers_jax.training.logging import MetricsLogger
        with MetricsLogger({str(tmp_path)!r}, total_steps=2000) as logger:
            logger.print_summary({{"parameters": 124_439_808, "note": "[b]"}})
            logger.log(1, {{"loss": 4.0, "learning_rate": 1e-3, "tokens_per_second": 1200.0, "mfu": 0.4127}})
            started = time.perf_counter()
            for step in range(2, 20_001):
                logger.update(min(step, 1999))
            each = (time.perf_counter() - started) / 20_000
            logger.print("a sample [with] brackets")
            logging.getLogger("x").warning("a warning")
            time.sleep(0.25)
            logger.log(2000, {{"loss": 2.0, "eval/loss": 1.5}})
        print("microseconds", each * 1e6)
    """
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=follower, stderr=follower, stdin=follower,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )  # fmt: skip
    os.close(follower)
    output = b""
    try:
        while chunk := os.read(leader, 1 << 16):
            output += chunk
    except OSError:
        pass  # the other end is closed
    os.close(leader)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert child.wait(timeout=60) == 0, text
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    assert any("parameters" in line and "124.4 M" in line for line in lines)
    assert any("[b]" in line for line in lines)
    assert "a sample [with] brackets" in lines
    assert "a warning" in lines
    assert "step 2,000/2,000  loss 2.0000  eval/loss 1.5000" in lines
    last = next(line for line in reversed(lines) if "lr" in line)
    assert re.fullmatch(r"step 2,000/2,000 ━+ loss 2.0000  lr 1.00e-03  1.2 k tokens/s  MFU 41.3%  0:00 left", last), (
        last
    )
    assert float(re.search(r"microseconds ([\d.]+)", text)[1]) < 50


def scalars(directory):
    """(step, tag, value) of all events in the order they were written, and the step of each restart."""
    from tensorboardX.proto.event_pb2 import Event

    found, restarts = [], []
    for path in sorted(directory.iterdir()):
        content, start = path.read_bytes(), 0
        while start < len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            event = Event.FromString(content[start + 12 : start + 12 + length])
            start += 16 + length
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            if event.HasField("session_log"):
                restarts.append(event.step)
    return found, restarts


def test_tensorboard_gets_the_numbers_and_forgets_what_a_resume_undoes(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricsLogger(tmp_path, total_steps=10, console="none") as logger:
        logger.log(1, {"loss": 1.5, "phase": "a", "bad": float("nan")})
    assert scalars(tmp_path / "tensorboard") == ([(1, "loss", 1.5)], [])
    with MetricsLogger(tmp_path, total_steps=10, console="none") as logger:
        logger.truncate(0)
        logger.log(1, {"loss": 2.5})
    assert sorted(scalars(tmp_path / "tensorboard")[0]) == [(1, "loss", 1.5), (1, "loss", 2.5)]
    assert scalars(tmp_path / "tensorboard")[1] == [1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (999, "999"),
        (1234, "1.2 k"),
        (999_960, "1.0 M"),
        (124_439_808, "124.4 M"),
        (2e11, "200.0 B"),
    ],
)
def test_counts_are_short(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.7, "1:00"), (185, "3:05"), (3725, "1:02:05"), (100_000, "1 d 3:46:40")]
)
def test_durations_are_those_of_a_clock(seconds, text):
    assert format_duration(seconds) == text
