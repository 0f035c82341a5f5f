"""Checkpoints survive kills, damage, other meshes and other types; nothing good is ever lost."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer
from transformers_jax.training.paths import named_leaves
from transformers_jax.training.state import TrainState

REPOSITORY = Path(__file__).resolve().parents[2]


class Model(nnx.Module):
    def __init__(self, rngs, dim=8):
        self.embedding = nnx.Embed(16, dim, rngs=rngs)
        self.value = nnx.Linear(dim, 2 * dim, rngs=rngs, param_dtype=jnp.bfloat16)


OPTIMIZER = make_optimizer(OptimizerConfig(), 100, jax.eval_shape(lambda: Model(nnx.Rngs(0))))


def make_state(step=0, dim=8):
    model = jax.tree.map(lambda x: x + step, Model(nnx.Rngs(0), dim))
    optimizer = OPTIMIZER if dim == 8 else make_optimizer(OptimizerConfig(), 100, model)
    return TrainState(jnp.int32(step), model, optimizer.init(model))


def abstract(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def assert_equal(ours, theirs):
    ours, theirs = named_leaves(ours), named_leaves(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(value), err_msg=name)


def save_steps(directory, steps, losses=None, **options):
    with Checkpointer(directory, **options) as checkpointer:
        for index, step in enumerate(steps):
            metrics = {"eval/loss": losses[index]} if losses else None
            checkpointer.save(step, make_state(step), {"position": step}, metrics)


# --- round trips


def test_what_is_saved_comes_back(tmp_path):
    state, meta = make_state(7), {"position": 7, "fingerprint": {"seed": 0, "text": "ä"}, "patience": None}
    with Checkpointer(tmp_path / "new" / "run") as checkpointer:
        checkpointer.save(7, state, meta)
        step, restored, restored_meta = checkpointer.restore_latest(abstract(state))
    assert step == 7 and restored_meta == meta
    assert isinstance(restored.model, Model)
    assert_equal(restored, state)


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path):
    with Checkpointer(tmp_path / "missing") as checkpointer:
        assert checkpointer.restore_latest(abstract(make_state())) is None
        assert checkpointer.steps() == [] and checkpointer.best_step() is None
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            checkpointer.read_meta()
    assert not (tmp_path / "missing").exists()


def test_the_format_knows_neither_flax_nor_optax(tmp_path):
    save_steps(tmp_path, [3])
    plain = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in named_leaves(make_state()).items()}
    with Checkpointer(tmp_path) as checkpointer:
        _, restored, _ = checkpointer.restore(3, plain)
    assert "model.value.kernel" in restored and "model.embedding.embedding" in restored
    assert_equal(restored, make_state(3))


def test_the_model_alone_can_be_read_in_another_type(tmp_path):
    save_steps(tmp_path, [3])
    model = jax.eval_shape(lambda: jax.tree.map(lambda x: x.astype(jnp.float16), Model(nnx.Rngs(0))))
    with Checkpointer(tmp_path) as checkpointer:
        step, restored, meta = checkpointer.restore("latest", model, part="model")
    assert step == 3 and meta == {"position": 3}
    assert_equal(restored, jax.tree.map(lambda x: x.astype(jnp.float16), make_state(3).model))


def test_a_state_may_be_donated_while_it_is_being_written(tmp_path):
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = advance({"a": jnp.zeros((500, 1000)), "b": jnp.zeros(3)})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        for _ in range(10):
            state = advance(state)
        _, restored, _ = checkpointer.restore("latest", abstract(state))
    np.testing.assert_array_equal(restored["a"], 1)
    np.testing.assert_array_equal(state["a"], 11)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_checkpoint_is_read_on_any_mesh(tmp_path, devices):
    def place(state, mesh, spec):
        def sharding(leaf):
            return NamedSharding(mesh, spec if leaf.ndim == 2 else PartitionSpec())

        return jax.tree.map(sharding, state)

    state = make_state(5)
    wide = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, jax.device_put(state, place(state, wide, PartitionSpec("data", "tensor"))), {})
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    places = place(state, mesh, PartitionSpec(None, "fsdp"))
    target = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)
    with Checkpointer(tmp_path) as checkpointer:
        _, restored, _ = checkpointer.restore_latest(target)
    assert_equal(restored, state)
    jax.tree.map(
        lambda x, place: x.sharding.is_equivalent_to(place, x.ndim) or pytest.fail(str(place)), restored, places
    )


def test_another_shape_is_an_error_that_lists_the_parameters(tmp_path):
    save_steps(tmp_path, [3, 4])
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError) as error:
            checkpointer.restore_latest(abstract(make_state(dim=4)))
        assert "model.value.kernel has shape (8, 16) there and (4, 8) here" in str(error.value)
        assert "model.embedding.embedding has shape (16, 8) there and (16, 4) here" in str(error.value)
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=r"model\.extra is not in the checkpoint"):
            checkpointer.restore(4, {"extra": jax.ShapeDtypeStruct((), jnp.float32)}, part="model")
        with pytest.raises(ValueError, match=r"model\.value\.bias is only in the checkpoint"):
            checkpointer.restore(4, {"value": {"kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32)}}, part="model")
        assert checkpointer.steps() == [3, 4]


def test_meta_that_is_not_json_is_refused_at_once(tmp_path):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError):
        checkpointer.save(1, make_state(1), {"position": object()})


# --- what is kept


def test_the_latest_and_the_best_are_kept(tmp_path):
    save_steps(tmp_path, [1, 2, 3, 4, 5, 6], losses=[3.0, 1.0, float("nan"), 2.0, 1.0, 4.0], keep_latest=1)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [2, 6]
        assert checkpointer.best_step() == 2
        assert checkpointer.read_meta("best") == (2, {"position": 2})
        assert checkpointer.restore("latest", abstract(make_state()))[0] == 6
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 5 in .*; there are \[2, 6\]"):
            checkpointer.restore(5, abstract(make_state()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "6"]


def test_best_may_mean_largest(tmp_path):
    options = {"keep_latest": 1, "keep_best": 2, "best_metric": "eval/loss", "best_mode": "max"}
    save_steps(tmp_path, [1, 2, 3, 4], losses=[3.0, 1.0, 2.0, 0.0], **options)
    with Checkpointer(tmp_path, **options) as checkpointer:
        assert checkpointer.steps() == [1, 3, 4]
        assert checkpointer.best_step() == 1


def test_best_is_the_latest_where_nothing_was_evaluated(tmp_path):
    save_steps(tmp_path, [1, 2])
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.best_step() is None
        assert checkpointer.restore("best", abstract(make_state()))[0] == 2


def test_a_step_can_be_saved_again_and_the_old_one_stays_until_then(tmp_path):
    save_steps(tmp_path, [1, 2])
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, make_state(20), {"position": "again"})
        _, restored, meta = checkpointer.restore("latest", abstract(make_state()))
        assert checkpointer.steps() == [1, 2]
    assert meta == {"position": "again"}
    assert_equal(restored, make_state(20))
    assert len(list(tmp_path.iterdir())) == 2


def test_continuing_from_an_earlier_step_leaves_no_later_one(tmp_path):
    save_steps(tmp_path, [10, 20], losses=[1.0, 0.5])
    save_steps(tmp_path, [15])
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [10, 15]
        assert checkpointer.best_step() == 10


# --- damage


def arrays_file(step_directory):
    return max(
        (path for path in (step_directory / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )


def flip(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "flipped bit in the arrays": lambda step: flip(arrays_file(step)),
    "truncated arrays": lambda step: truncate(arrays_file(step)),
    "deleted arrays": lambda step: arrays_file(step).unlink(),
    "deleted metadata": lambda step: (step / "state" / "_METADATA").unlink(),
    "flipped bit in the meta": lambda step: flip(step / "meta" / "metadata"),
    "truncated meta": lambda step: truncate(step / "meta" / "metadata"),
    "deleted manifest": lambda step: (step / "manifest.json").unlink(),
    "truncated manifest": lambda step: truncate(step / "manifest.json"),
    "empty manifest": lambda step: (step / "manifest.json").write_text('{"files": {}}'),
    "empty directory": lambda step: step.with_name("99").mkdir(),
    "file with the name of a step": lambda step: step.with_name("99").write_text(""),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_passed_over_with_one_line(tmp_path, caplog, kind):
    save_steps(tmp_path, [1, 2, 3], losses=[3.0, 2.0, 1.0])
    DAMAGE[kind](tmp_path / "3")
    undamaged = kind in ("empty directory", "file with the name of a step")
    usable = 3 if undamaged else 2
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.read_meta()[0] == usable
        step, restored, meta = checkpointer.restore_latest(abstract(make_state()))
        assert step == usable and meta == {"position": usable}
        assert_equal(restored, make_state(usable))
        assert checkpointer.restore("best", abstract(make_state()))[0] == usable
        if not undamaged:
            with pytest.raises(ValueError, match="3 is damaged"):
                checkpointer.restore(3, abstract(make_state()))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (0 if kind.startswith("file") else 1)
    assert all("is passed over" in text and "\n" not in text for text in warnings)


def test_after_damage_the_same_step_can_be_saved_again(tmp_path):
    save_steps(tmp_path, [1, 2, 3])
    flip(arrays_file(tmp_path / "3"))  # found by its contents only
    (tmp_path / "9").mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest(abstract(make_state()))[0] == 2
        checkpointer.save(3, make_state(3), {"position": "new"})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
        step, restored, meta = checkpointer.restore_latest(abstract(make_state()))
    assert (step, meta) == (3, {"position": "new"})
    assert_equal(restored, make_state(3))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_checkpoint_never_counts_among_those_kept(tmp_path):
    save_steps(tmp_path, [1, 2, 3])
    flip(arrays_file(tmp_path / "3"))
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest(abstract(make_state()))[0] == 2
        checkpointer.save(4, make_state(4), {})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 4]


def test_where_all_are_damaged_there_is_none(tmp_path):
    save_steps(tmp_path, [1, 2])
    for step in ("1", "2"):
        truncate(arrays_file(tmp_path / step))
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_latest(abstract(make_state())) is None
        with pytest.raises(FileNotFoundError, match="no usable checkpoint in"):
            checkpointer.restore("best", abstract(make_state()))


def test_a_failed_save_is_reported_and_costs_nothing(tmp_path, monkeypatch):
    save_steps(tmp_path, [1])
    checkpointer = Checkpointer(tmp_path)
    monkeypatch.setattr(
        "transformers_jax.training.checkpoint._files", lambda path: (_ for _ in ()).throw(OSError("full"))
    )
    checkpointer.save(2, make_state(2), {})
    with pytest.raises(OSError, match="full"):
        checkpointer.wait()
    monkeypatch.undo()
    assert checkpointer.restore_latest(abstract(make_state()))[0] == 1
    checkpointer.save(2, make_state(2), {})
    checkpointer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


# --- kill -9

CHILD = """
    import os, signal, sys, time
    sys.path.insert(0, {repository!r})
    import jax, jax.numpy as jnp
    jax.config.update("jax_platforms", "cpu")
    from transformers_jax.training import checkpoint
    from transformers_jax.training.checkpoint import Checkpointer, epath

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def state(step):
        return {{"model": {{"w": jnp.full((700, 700), step, jnp.float32)}}, "step": jnp.int32(step)}}

    directory, moment = sys.argv[1], sys.argv[2]
    with Checkpointer(directory, keep_latest=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), {{"position": step}})
        checkpointer.wait()
        print("ready", flush=True)
        if moment == "before the manifest":
            checkpoint._files = die
        elif moment == "after the manifest":
            finalize = checkpoint._Handler.finalize
            checkpoint._Handler.finalize = lambda *arguments: die(finalize(*arguments))
        elif moment == "before deleting":
            checkpoint.Checkpointer._prune = die
        elif moment == "while deleting":
            type(epath.Path("/tmp")).rmtree = die
        checkpointer.save(3, state(3), {{"position": 3}})
        if moment.startswith("in"):
            time.sleep(float(moment.split()[1]) / 1000)
            die()
        checkpointer.wait()
    time.sleep(5)
"""
MOMENTS = [f"in {ms} ms" for ms in (0, 20)] + [
    "before the manifest",
    "after the manifest",
    "before deleting",
    "while deleting",
]


def test_kill_9_at_any_moment_leaves_a_good_checkpoint_and_saving_goes_on(tmp_path):
    script = textwrap.dedent(CHILD).format(repository=str(REPOSITORY))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / moment), moment],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for moment in MOMENTS
    ]
    found = {}
    for moment, child in zip(MOMENTS, children, strict=True):
        out, err = child.communicate(timeout=120)
        assert child.returncode == -signal.SIGKILL, (moment, err.decode())
        assert out.decode() == "ready\n", moment
        target = {
            "model": {"w": jax.ShapeDtypeStruct((700, 700), jnp.float32)},
            "step": jax.ShapeDtypeStruct((), jnp.int32),
        }
        with Checkpointer(tmp_path / moment, keep_latest=1) as checkpointer:
            step, state, meta = checkpointer.restore_latest(target)
            assert step in (2, 3) and meta == {"position": step}, moment
            assert int(state["step"]) == step and (np.asarray(state["model"]["w"]) == step).all(), moment
            found[moment] = step
            for later in (3, 4):
                checkpointer.save(later, jax.tree.map(jnp.zeros_like, state), {})
            checkpointer.wait()
            assert checkpointer.steps() == [4]
            assert [path.name for path in (tmp_path / moment).iterdir()] == ["4"], moment
    assert found["before the manifest"] == 2
    assert found["before deleting"] == found["while deleting"] == 3


def test_another_process_with_one_device_reads_without_a_word(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    rows = jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh, PartitionSpec("fsdp")))
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": {"w": rows}}, {"position": step})
    truncate(arrays_file(tmp_path / "2"))
    script = f"""
        import sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        import jax, jax.numpy as jnp
        jax.config.update("jax_platforms", "cpu")
        from transformers_jax.training.checkpoint import Checkpointer
        with Checkpointer({str(tmp_path)!r}) as checkpointer:
            w = jax.ShapeDtypeStruct((16, 4), jnp.float32)
            step, state, meta = checkpointer.restore_latest({{"model": {{"w": w}}}})
            checkpointer.save(3, state, meta)
        print(jax.device_count(), step, state["model"]["w"].sum(), meta)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 1 2016.0 {'position': 1}\n"
    # The one line about the damaged checkpoint, and nothing of orbax or jax.
    assert done.stderr.count("\n") == 1 and "2 is passed over" in done.stderr, done.stderr


def test_the_manifest_covers_every_file_of_arrays_and_meta(tmp_path):
    save_steps(tmp_path, [1])
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())["files"]
    on_disk = {
        path.relative_to(tmp_path / "1").as_posix()
        for item in ("state", "meta")
        for path in (tmp_path / "1" / item).rglob("*")
        if path.is_file()
    }
    assert set(manifest) == on_disk


@pytest.mark.parametrize("options", [{"keep_latest": 0}, {"keep_best": -1}, {"best_mode": "least"}])
def test_impossible_options_are_refused(tmp_path, options):
    with pytest.raises(Exception, match=r"keep_latest|best_mode"):
        Checkpointer(tmp_path, **options)
