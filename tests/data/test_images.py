"""Which images there are, their labels, which are held out, and which are refused before training."""

import errno
import gzip
import io
import json
import os
import pickle
import shutil
import struct
import sys
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from transformers_jax.data import ImageData, read_images
from transformers_jax.data.image_sources import Files
from transformers_jax.data.labelled import warn_once


def encoded(number=0, form="PNG", size=(6, 5)):
    """The picture of a number: its left upper pixel tells it, also in a lossy format."""
    array = np.full((*size, 3), number, np.uint8)
    file = io.BytesIO()
    Image.fromarray(array).save(file, format=form)
    return file.getvalue()


def put(path, number=0, form="PNG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(number, form))
    return path


def read(source, part="all", channels=3, **options):
    return read_images(ImageData(source=str(source), **options), part=part, channels=channels)


def numbers(images):
    return [images.read(i).getpixel((0, 0))[0] for i in range(len(images))]


def names(images, root):
    return [os.path.relpath(images.where(i), root) for i in range(len(images))]


def tree(root, **counts):
    number = 0
    for name, count in counts.items():
        for i in range(count):
            put(root / name / f"{i:02}.png", number)
            number += 1
    return root


# Class folders


def test_class_folders(tmp_path):
    put(tmp_path / "dog" / "b.png", 1)
    put(tmp_path / "dog" / "a.JPEG", 2, "JPEG")
    put(tmp_path / "dog" / "deep" / "er" / "c.webp", 3, "WEBP")
    put(tmp_path / "cat, and others" / "with space é图.gif", 4, "GIF")
    put(tmp_path / "cat, and others" / "two\nlines.bmp", 5, "BMP")
    for ignored in ("dog/.hidden.png", "dog/._b.png", ".hidden/a.png", "dog/.hidden/a.png"):
        put(tmp_path / ignored)
    for ignored in ("dog/notes.txt", "dog/Thumbs.db", "README.md", "stray.png"):
        (tmp_path / ignored).write_text("no image")
    images = read(tmp_path)
    assert images.labels == ("cat, and others",) * 2 + ("dog",) * 3
    assert len(images) == 5
    assert numbers(images) == [5, 4, 2, 1, 3]
    assert images.where(3) == f"{tmp_path}/dog/b.png"
    assert images.where(0) == repr(f"{tmp_path}/cat, and others/two\nlines.bmp")
    assert read(tmp_path, channels=1).read(0).mode == "L"


def test_several_sources_and_home(tmp_path, monkeypatch):
    tree(tmp_path / "one", a=2)
    tree(tmp_path / "two, really", a=1, b=1)
    monkeypatch.setenv("HOME", str(tmp_path))
    both = read(f"~/one, {tmp_path}/one, ~/one")
    assert both.labels == ("a",) * 4  # each name once
    assert numbers(both) == [0, 1, 0, 1]
    assert read(tmp_path / "two, really").labels == ("a", "b")


@pytest.mark.parametrize("folder", ["val", "validation", "valid", "test"])
def test_parts_that_the_folders_give(tmp_path, folder):
    tree(tmp_path / "train", a=3, b=2)
    tree(tmp_path / folder, a=1, b=1)
    assert names(read(tmp_path, "train"), tmp_path) == [
        f"train/{n}.png" for n in ("a/00", "a/01", "a/02", "b/00", "b/01")
    ]
    assert names(read(tmp_path, "validation"), tmp_path) == [f"{folder}/a/00.png", f"{folder}/b/00.png"]
    assert len(read(tmp_path, "all")) == 7
    other = tree(tmp_path / "other", a=4)
    assert names(read(tmp_path / "train", "validation", validation_source=str(other)), other) == [
        f"a/{i:02}.png" for i in range(4)
    ]


def test_validation_comes_before_test_and_another_source_before_both(tmp_path):
    for part in ("train", "test", "val"):
        tree(tmp_path / "set" / part, a=2)
    other = tree(tmp_path / "other", a=1)
    root = tmp_path / "set"
    assert names(read(root, "validation"), root) == ["val/a/00.png", "val/a/01.png"]
    options = {"validation_source": str(other)}
    assert names(read(root, "validation", **options), other) == ["a/00.png"]
    assert names(read(root, "train", **options), root) == ["train/a/00.png", "train/a/01.png"]
    # As a validation source, such a directory gives its validation part.
    assert names(read(other, "validation", validation_source=str(root)), root) == ["val/a/00.png", "val/a/01.png"]


def test_train_alone_is_split_and_may_be_a_class(tmp_path):
    tree(tmp_path / "set" / "train", a=5, b=5)
    root = tmp_path / "set"
    held_out = read(root, "validation", validation_fraction=0.2)
    assert held_out.labels == ("a", "b")
    assert len(read(root, "train", validation_fraction=0.2)) == 8
    tree(tmp_path / "more" / "train", a=1, b=1)
    tree(tmp_path / "more" / "test", a=1)
    (tmp_path / "more" / "devkit").mkdir()  # says nothing about classes
    assert read(tmp_path / "more", "validation").labels == ("a",)
    put(tmp_path / "flat" / "val" / "0.png")
    tree(tmp_path / "flat" / "train", a=1, b=1)
    assert read(tmp_path / "flat", "train").labels == ("a", "b")
    with pytest.raises(ValueError, match="flat/val: there is no folder of a class in it"):
        read(tmp_path / "flat", "validation")
    vehicles = tree(tmp_path / "vehicles", train=2, bus=2, test=1)
    assert set(read(vehicles).labels) == {"train", "bus", "test"}


def test_classes_are_the_same_in_both_parts_however_uneven(tmp_path):
    """Case C05: an empty or missing folder in validation moves no class."""
    tree(tmp_path / "train", a=40, b=3, c=1, d=12)
    tree(tmp_path / "val", a=2, c=1, d=3)
    (tmp_path / "val" / "b").mkdir()
    put(tmp_path / "val" / ".ipynb_checkpoints" / "x.png")
    (tmp_path / "val" / "notes.txt").touch()
    assert Counter(read(tmp_path, "train").labels) == {"a": 40, "b": 3, "c": 1, "d": 12}
    assert read(tmp_path, "validation").labels == ("a", "a", "c", "d", "d", "d")
    tree(tmp_path / "val", e=1)
    assert "e" in read(tmp_path, "validation").labels  # what a model does not know is for its task to refuse
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path}/train/empty: no image of the class 'empty' is in this folder"):
        read(tmp_path, "train")
    read(tmp_path, "validation")


def test_broken_files_are_named_or_counted(tmp_path, caplog):
    """Case C07: 20 JPEGs, of which five are not whole."""
    expected = {}
    for i in range(20):
        path = put(tmp_path / "ab"[i % 2] / f"{i:02}.jpg", i * 10, "JPEG")
        data = path.read_bytes()
        broken = {3: data[:-54], 6: data[: len(data) // 2], 9: data[:10], 12: b"", 15: b"text\n" * 300}
        if i in broken:
            path.write_bytes(broken[i])
        else:
            expected[i] = "ab"[i % 2]
    for check in ("quick", "full"):
        with pytest.raises(ValueError, match=r"a/06\.jpg: not a whole image") as caught:
            read(tmp_path, check=check)
        assert "\n" not in str(caught.value)
    warn_once.cache_clear()
    images = read(tmp_path, skip_bad=True)
    (record,) = caplog.records
    assert record.message.startswith(f"5 of 20 images skipped; the first: {tmp_path}/a/06.jpg: not a whole image")
    assert len(images) == 15 and Counter(images.labels) == Counter(expected.values())
    for i in range(15):
        number = int(os.path.basename(images.where(i)).removesuffix(".jpg"))
        assert abs(numbers(images)[i] - number * 10) <= 1
        assert images.labels[i] == expected[number]
    parts = [read(tmp_path, part, skip_bad=True, validation_fraction=0.2) for part in ("train", "validation")]
    assert [len(part) for part in parts] == [12, 3]
    unchecked = read(tmp_path, check="none")
    assert len(unchecked) == 20
    for i in range(20):
        if int(os.path.basename(unchecked.where(i)).removesuffix(".jpg")) in expected:
            unchecked.read(i)
        else:
            with pytest.raises(ValueError, match=r"\.jpg: .*; data\.check=full finds this before training"):
                unchecked.read(i)


def test_only_a_full_check_sees_damage_in_the_middle(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "a" / "0.png"
    path.parent.mkdir()
    Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(path)
    data = bytearray(path.read_bytes())
    data[1000:1400] = bytes(400)
    path.write_bytes(data)
    images = read(tmp_path)
    with pytest.raises(ValueError, match=r"a/0\.png: not a whole image \(.*\); data\.check=full finds this"):
        images.read(0)
    with pytest.raises(ValueError, match=r"a/0\.png: not a whole image"):
        read(tmp_path, check="full")


def test_a_class_or_a_source_without_whole_images_is_an_error(tmp_path):
    tree(tmp_path, a=3, b=1)
    (tmp_path / "b" / "00.png").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"no image of the class 'b' is whole; the first: .*b/00\.png: the file is empty"
    ):
        read(tmp_path, "train", skip_bad=True)
    for path in (tmp_path / "a").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no images can be used \(all 4 were skipped; the first: "):
        read(tmp_path, skip_bad=True)


def test_a_file_that_changes_after_the_check(tmp_path):
    tree(tmp_path, a=3)
    images = read(tmp_path, check="full")
    (tmp_path / "a" / "01.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"a/01\.png: no such image file; "):
        images.read(1)
    assert numbers(read(tmp_path, skip_bad=True)) == [0, 2]
    (tmp_path / "a" / "00.png").write_bytes(bytes(len(encoded())))  # as large as before
    assert numbers(read(tmp_path, skip_bad=True)) == [2]


@pytest.mark.parametrize("folders", [("Training", "Testing"), ("val",), ("Train", "Val"), ("test", "validation")])
def test_parts_under_other_names_are_no_classes(tmp_path, folders):
    for folder in folders:
        tree(tmp_path / folder, cat=2, dog=2)
    with pytest.raises(ValueError, match=r"its folders \(.*\) are called like parts of a set, .* rename them"):
        read(tmp_path, "train")
    images = read(tmp_path / folders[0], "train", validation_source=str(tmp_path / folders[-1]))
    assert images.labels == ("cat", "cat", "dog", "dog")


def test_classes_may_be_called_like_parts(tmp_path):
    assert set(read(tree(tmp_path, test=2, train=2)).labels) == {"test", "train"}


def test_folders_that_hold_no_images(tmp_path):
    with pytest.raises(ValueError, match=r"no folder of a class, no table .* and no IDX file is in it"):
        read(tmp_path)
    put(tmp_path / "stray.png")
    with pytest.raises(ValueError, match="images are read from CLASS/IMAGE or train/CLASS/IMAGE"):
        read(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path}/a: no image of the class 'a'"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no such directory or file of images: {tmp_path}/none"):
        read(tmp_path / "none")
    with pytest.raises(ValueError, match="not a table by its name"):
        read(tmp_path / "stray.png")
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match=r"no images can be used \(there are none\)"):
        read(tmp_path, "validation", validation_source=str(tmp_path))


def test_a_folder_that_the_system_refuses(tmp_path, monkeypatch):
    tree(tmp_path, a=1, b=1)
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("/b"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may open everything
    with pytest.raises(ValueError, match=f"^{tmp_path}/b: cannot be read .Permission denied."):
        read(tmp_path)


def test_links_are_followed_and_files_read_once(tmp_path):
    tree(tmp_path / "real", a=2)
    root = tree(tmp_path / "set", b=1)
    (root / "a").symlink_to(tmp_path / "real" / "a")
    (root / "b" / "again.png").symlink_to(root / "b" / "00.png")
    (root / "b" / "more").symlink_to(root / "b")  # a circle
    other = put(tmp_path / "elsewhere.png", 9)
    (root / "b" / "linked.png").symlink_to(other)
    images = read(root)
    assert names(images, root) == ["a/00.png", "a/01.png", "b/00.png", "b/linked.png"]
    assert numbers(images) == [0, 1, 0, 9]
    (root / "a" / "contradiction.png").symlink_to(other)
    with pytest.raises(
        ValueError, match=r"b/linked\.png: the same file as .*a/contradiction\.png, but in the folder of"
    ):
        read(root)
    assert names(read(root, skip_bad=True), root) == ["a/00.png", "a/01.png", "a/contradiction.png", "b/00.png"]
    other.unlink()
    with pytest.raises(ValueError, match=r"a/contradiction\.png: not a file, or a link to none"):
        read(root)


def test_a_class_whose_name_is_no_text(tmp_path):
    put(tmp_path / os.fsdecode(b"caf\xe9") / "a.png")
    with pytest.raises(ValueError, match=r"caf\\udce9': the name of this folder is no name for a class"):
        read(tmp_path)


# Tables


def write_csv(path, rows, header="image,label"):
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")
    return path


def test_tables_of_every_kind(tmp_path):
    put(tmp_path / "pictures" / "a b.png", 1)
    put(tmp_path / "pictures" / "ü.png", 2)
    absolute = str(put(tmp_path / "elsewhere" / "c.png", 3))
    rows = [
        ("pictures/a b.png", "cat"),
        ("pictures/ü.png", "dog"),
        (absolute, "cat"),
        ("pictures/../pictures/ü.png", "dog"),
    ]
    objects = [{"label": label, "image": image} for image, label in rows]
    write_csv(tmp_path / "t.csv", rows)
    (tmp_path / "t.tsv").write_text("label\timage\n" + "".join(f"{label}\t{image}\n" for image, label in rows))
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, objects)))
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(objects), tmp_path / "t.parquet")
    found = {}
    for name in ("t.csv", "t.tsv", "t.jsonl", "t.csv.gz", "t.parquet"):
        images = read(tmp_path / name)
        assert images.labels == ("cat", "dog", "cat", "dog"), name
        assert numbers(images) == [1, 2, 3, 2], name
        found[name] = images
    assert found["t.csv"].where(1) == f"{tmp_path}/t.csv, line 3 (pictures/ü.png)"
    assert found["t.parquet"].where(1) == f"{tmp_path}/t.parquet, row 2 (pictures/ü.png)"
    assert len(read(f"{tmp_path}/t.csv,{tmp_path}/t.jsonl")) == 8
    moved = shutil.move(tmp_path / "pictures", tmp_path / "q")
    with pytest.raises(ValueError, match=rf"t\.csv, line 2: no such image file: {tmp_path}/pictures/a b\.png"):
        read(tmp_path / "t.csv")
    shutil.move(moved, tmp_path / "pictures")
    bare = write_csv(tmp_path / "bare.csv", rows[1:], header=",".join(rows[0]))
    assert read(bare, image_column="0", label_column="1").labels == ("cat", "dog", "cat", "dog")


def test_tables_of_parts(tmp_path):
    put(tmp_path / "a.png").rename(tmp_path / ".a.png")
    for name, label in (("train-0", "x"), ("train-1", "y"), ("validation", "z"), ("test", "never")):
        write_csv(tmp_path / f"{name}.csv", [(".a.png", label)])
    assert read(tmp_path, "train").labels == ("x", "y")
    assert read(tmp_path, "validation").labels == ("z",)
    (tmp_path / "validation.csv").unlink()
    assert read(tmp_path, "validation").labels == ("never",)
    (tmp_path / "test.csv").unlink()
    assert read(tmp_path).labels == ("x", "y")


def test_bytes_in_parquet_as_datasets_writes_them(tmp_path):
    cells = [{"bytes": encoded(i * 40, "JPEG"), "path": f"{i}.jpg"} for i in range(3)]
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.table({"image": cells, "label": [1, 0, 1]}).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, tmp_path / "train-00000.parquet")
    images = read(tmp_path)
    assert images.labels == ("dog", "cat", "dog")
    assert np.abs(np.subtract(numbers(images), [0, 40, 80])).max() <= 1
    assert images.where(2) == f"{tmp_path}/train-00000.parquet, row 3"
    plain = pyarrow.table({"image": [cell["bytes"] for cell in cells], "label": ["x", "y", "z"]})
    pyarrow.parquet.write_table(plain, tmp_path / "plain.parquet")
    assert numbers(read(tmp_path / "plain.parquet")) == numbers(images)
    cells[1]["bytes"] = cells[1]["bytes"][:-60]
    pyarrow.parquet.write_table(pyarrow.table({"image": cells, "label": [1, 0, 1]}), tmp_path / "cut.parquet")
    with pytest.raises(ValueError, match=r"cut\.parquet, row 2: not a whole image"):
        read(tmp_path / "cut.parquet")
    assert read(tmp_path / "cut.parquet", skip_bad=True).labels == ("1", "1")


BAD_ROWS = {
    "empty label": ({"image": "0.png", "label": " "}, "'label' is empty"),
    "no label": ({"image": "0.png", "label": None}, "'label' is empty"),
    "label list": ({"image": "0.png", "label": ["a"]}, r"'label' holds a list \(\['a'\]\); one class name or number"),
    "label fraction": ({"image": "0.png", "label": 0.5}, r"'label' holds a float \(0.5\)"),
    "number": ({"image": 7, "label": "a"}, r"'image' holds a int \(7\), not the path of an image"),
    "empty path": ({"image": "", "label": "a"}, "'image' is empty"),
    "no path": ({"image": None, "label": "a"}, "'image' is empty"),
    "missing file": ({"image": "none.png", "label": "a"}, r"no such image file: .*none\.png"),
    "a folder": ({"image": ".", "label": "a"}, r"\(\.\): cannot be read \(Is a directory\)"),
    "NUL": ({"image": "a\0b", "label": "a"}, "null"),
    "broken file": ({"image": "bad.png", "label": "a"}, r"\(bad\.png\): not an image of a known format"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_names_its_line(tmp_path, name):
    row, message = BAD_ROWS[name]
    put(tmp_path / "0.png", 5)
    (tmp_path / "bad.png").write_text("text")
    good = {"image": "0.png", "label": 3}
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, [good, row, good])))
    with pytest.raises(ValueError, match=rf"t\.jsonl, line 2.*{message}") as caught:
        read(tmp_path / "t.jsonl")
    assert "\n" not in str(caught.value)
    images = read(tmp_path / "t.jsonl", skip_bad=True)
    assert images.labels == ("3", "3") and numbers(images) == [5, 5]
    assert images.where(1).startswith(f"{tmp_path}/t.jsonl, line 3")


def test_columns_have_to_be_there(tmp_path):
    path = write_csv(tmp_path / "t.csv", [("a.png", "x")], header="file,class")
    with pytest.raises(ValueError, match="no column 'image'; set image_column to one of: file, class"):
        read(path)
    put(tmp_path / "a.png")
    assert read(path, image_column="file", label_column="class").labels == ("x",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_column": ""}, "image_column and label_column must not be empty"),
        ({"image_column": "label"}, "must differ, but both are label"),
        ({"source": " "}, "source is empty"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        ImageData(**{"source": "x", **options})


# Held out


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([0.05, 0.1, 0.2, 0.3, 0.5, 0.9]))
def test_each_class_gives_its_share(counts, fraction):
    from transformers_jax.data.images import _held_out

    labels = [str(i) for i, count in enumerate(counts) for _ in range(count)]
    total = round(len(labels) * fraction)
    if total == 0 or max(counts) == 1:
        with pytest.raises(ValueError, match="leaves none to evaluate on"):
            _held_out(labels, fraction, "x")
        return
    held_out = _held_out(labels, fraction, "x")
    given = Counter(label for label, out in zip(labels, held_out, strict=True) if out)
    room = sum(count - 1 for count in counts)
    assert held_out.sum() == min(total, room)
    for i, count in enumerate(counts):
        assert given[str(i)] <= count - 1
        if total <= room and all(count * (1 - fraction) >= 1 for count in counts):
            assert abs(given[str(i)] - count * fraction) < 1


def test_the_held_out_part_is_the_same_for_every_seed_and_complements_the_rest(tmp_path):
    tree(tmp_path, a=40, b=3, c=1, d=12)
    train, held_out = (read(tmp_path, part, validation_fraction=0.25) for part in ("train", "validation"))
    assert Counter(held_out.labels) == {"a": 10, "b": 1, "d": 3}
    together = names(train, tmp_path) + names(held_out, tmp_path)
    assert sorted(together) == names(read(tmp_path), tmp_path)
    assert names(train, tmp_path) == sorted(names(train, tmp_path))
    assert names(held_out, tmp_path) == sorted(names(held_out, tmp_path))
    again = read(tmp_path, "validation", validation_fraction=0.25)
    assert names(again, tmp_path) == names(held_out, tmp_path) and again.fingerprint == held_out.fingerprint
    numbers_of_a = [int(name[2:4]) for name in names(held_out, tmp_path) if name[0] == "a"]
    assert numbers_of_a != list(range(10)) and numbers_of_a != list(range(30, 40))  # not the first nor the last
    tree(tmp_path / "x", a=1, b=1)
    with pytest.raises(ValueError, match=r"a validation_fraction of 0\.1 of 2 images in 2 classes leaves none"):
        read(tmp_path / "x", "train")


# Fingerprints, and other processes


def test_the_fingerprint_tells_content_not_place(tmp_path):
    one = tree(tmp_path / "one", a=2, b=2)
    two = tmp_path / "two"
    shutil.copytree(one, two, copy_function=shutil.copyfile)  # other times
    first = read(one).fingerprint
    assert read(two).fingerprint == first == read(f"{one}/").fingerprint
    seen = {first, read(one, "train", validation_fraction=0.25).fingerprint}
    seen.add(read(one, "validation", validation_fraction=0.25).fingerprint)
    (two / "a" / "00.png").write_bytes(encoded(0, "PNG", (60, 50)))
    seen.add(read(two).fingerprint)
    (two / "a").rename(two / "c")
    seen.add(read(two).fingerprint)
    (two / "c" / "00.png").unlink()
    seen.add(read(two).fingerprint)
    table = write_csv(one / "t.csv", [("a/00.png", "x"), ("a/01.png", "y")])
    seen.add(read(table).fingerprint)
    write_csv(table, [("a/00.png", "y"), ("a/01.png", "x")])
    seen.add(read(table).fingerprint)
    for cells in ([encoded(1), encoded(2)], [encoded(1), encoded(3)]):
        pyarrow.parquet.write_table(pyarrow.table({"image": cells, "label": ["x", "y"]}), tmp_path / "b.parquet")
        seen.add(read(tmp_path / "b.parquet").fingerprint)
    assert len(seen) == 10


def test_a_set_goes_to_another_process(tmp_path, prepare_tfds):
    tree(tmp_path, a=2, b=1)
    for source in (tmp_path, "builtin:digits", digits_of_tfds(prepare_tfds)):
        images = read(source)
        copy = pickle.loads(pickle.dumps(images))
        assert (copy.labels, copy.fingerprint) == (images.labels, images.fingerprint)
        for i in range(3):
            assert copy.read(i).tobytes() == images.read(i).tobytes()
            assert copy.where(i) == images.where(i)


def test_many_files_stay_small():
    count = 20_000
    paths = [f"n{i // 1000:08}/n{i // 1000:08}_{i}.JPEG" for i in range(count)]
    labels = [sys.intern(path.split("/")[0]) for path in paths]
    files = Files("/data/imagenet", [path.encode() for path in paths], labels, np.ones((count, 2), np.int64))
    assert files[1234] == f"/data/imagenet/{paths[1234]}" and files[0] == f"/data/imagenet/{paths[0]}"
    assert files.where(count - 1) == f"/data/imagenet/{paths[-1]}"
    assert len(pickle.dumps(files)) < 60 * count


# Sets that come as arrays


def test_digits():
    sklearn = pytest.importorskip("sklearn.datasets")
    raw = sklearn.load_digits()
    images = read("builtin:digits")
    assert len(images) == 1797
    assert images.labels == tuple(map(str, raw.target))
    assert images.where(7) == "builtin:digits, image 7"
    for i in (0, 1796):
        picture = np.array(read("builtin:digits", channels=1).read(i))
        np.testing.assert_allclose(picture, raw.images[i] * 255 / 16, atol=0.5)
        np.testing.assert_array_equal(np.array(images.read(i)), np.stack([picture] * 3, -1))
    train, held_out = (read("builtin:digits", part, validation_fraction=0.2) for part in ("train", "validation"))
    assert (len(train), len(held_out)) == (1438, 359)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr("transformers_jax.data.image_sources.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"part of scikit-learn; install it with `pip install 'transformers-jax\[metrics\]'`"
    ):
        read("builtin:digits")
    with pytest.raises(ValueError, match="builtin:letters is not built in; there is builtin:digits"):
        read("builtin:letters")


def write_idx(path, array, *, kind=8):
    content = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("ending", ["-ubyte", "-ubyte.gz"])
def test_idx_files(tmp_path, ending):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 5, 7), np.uint8)
    labels = np.arange(12, dtype=np.uint8) % 3
    for prefix, count in (("train-", 12), ("t10k-", 4)):
        write_idx(tmp_path / f"{prefix}images-idx3{ending}", pixels[:count])
        write_idx(tmp_path / f"{prefix}labels-idx1{ending}", labels[:count])
    train, held_out = read(tmp_path, "train", channels=1), read(tmp_path, "validation", channels=1)
    assert train.labels == ("0", "1", "2") * 4 and held_out.labels == ("0", "1", "2", "0")
    np.testing.assert_array_equal([np.array(train.read(i)) for i in range(12)], pixels)
    np.testing.assert_array_equal([np.array(held_out.read(i)) for i in range(4)], pixels[:4])
    if ending == "-ubyte":  # a packed copy beside it, as downloads leave it
        write_idx(tmp_path / "train-images-idx3-ubyte.gz", pixels)
        assert len(read(tmp_path, "train")) == 12
    one = tmp_path / f"train-images-idx3{ending}"
    assert len(read(one, "validation", validation_fraction=0.25)) == 3
    assert train.where(3) == f"{one}, image 3"
    assert train.fingerprint != held_out.fingerprint


def test_broken_idx_files(tmp_path):
    images = write_idx(tmp_path / "images-idx3-ubyte", np.zeros((3, 4, 4), np.uint8))
    labels = tmp_path / "labels-idx1-ubyte"
    with pytest.raises(FileNotFoundError, match=f"there is no labels-idx1-ubyte in {tmp_path}"):
        read(tmp_path)
    write_idx(labels, np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="images-idx3-ubyte holds 3 images, but labels-idx1-ubyte 2 labels"):
        read(tmp_path)
    write_idx(labels, np.zeros(3, np.uint8))
    assert len(read(tmp_path)) == 3
    whole = images.read_bytes()
    for content, message in (
        (whole[:-1], r"not whole; shape \(3, 4, 4\) needs 48 bytes, but 47 follow"),
        (whole + b"x", "needs 48 bytes, but 49 follow"),
        (whole[:9], "not an IDX file of bytes with 3 axes"),
        (b"", "not an IDX file"),
        (labels.read_bytes(), r"it begins with '00000801'"),
    ):
        images.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read(tmp_path)
    images.unlink()
    packed = write_idx(tmp_path / "images-idx3-ubyte.gz", np.zeros((3, 4, 4), np.uint8))
    write_idx(tmp_path / "labels-idx1-ubyte.gz", np.zeros(3, np.uint8))
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"images-idx3-ubyte\.gz: not a whole gzip file"):
        read(tmp_path)


def test_real_mnist(shared_data):
    images = read(shared_data / "mnist", channels=1)
    assert len(images) == 8000 and set(images.labels) == set("0123456789")
    with gzip.open(shared_data / "mnist" / "images-idx3-ubyte.gz") as file:
        raw = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    for i in (0, 7999):
        np.testing.assert_array_equal(np.array(images.read(i)), raw[i])


# TFDS


def digits_of_tfds(prepare_tfds):
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
        "mask": tfds.features.Image(shape=(None, None, 1)),
        "id": tfds.features.Text(),
    }
    broken = io.BytesIO(b"no image, and nothing decodes it")
    rows = [
        {
            "image": io.BytesIO(encoded(i * 10, "JPEG", (9, 12))),
            "label": i % 2,
            "mask": broken if i == 1 else io.BytesIO(encoded(1)),
            "id": f"id{i}",
        }
        for i in range(6)
    ]
    for row in rows:
        row["mask"].seek(0)
    return prepare_tfds(f"PicturesForTest{next(COUNT)}", features, {"train": rows, "test": rows[:2]})


COUNT = iter(range(100))


def test_tfds_sets_are_decoded_by_us_without_tensorflow(prepare_tfds):
    source = digits_of_tfds(prepare_tfds)
    images = read(source)
    assert sorted(images.labels) == ["cat"] * 3 + ["dog"] * 3
    for value, label in zip(numbers(images), images.labels, strict=True):
        assert label == ("cat", "dog")[round(value / 10) % 2]
    assert images.read(0).size == (12, 9)
    assert images.where(2) == f"{source}, example 2"
    assert len(read(f"{source}:test")) == 2 and len(read(f"{source}:train[:50%]")) == 3
    assert read(source).fingerprint == images.fingerprint != read(f"{source}:test").fingerprint
    assert len(read(source, "validation", validation_source=f"{source}:test")) == 2
    assert "tensorflow" not in sys.modules
    with pytest.raises(ValueError, match="no column 'picture'; set image_column to one of: image, label, mask, id"):
        read(source, image_column="picture")
    with pytest.raises(ValueError, match="'id' is a Text, no image"):
        read(source, image_column="id")
    masks = read(source, image_column="mask")  # one of them is broken, which the quick check leaves alone
    with pytest.raises(ValueError, match=r"example \d: not an image of a known format"):
        read(source, image_column="mask", check="full")
    assert len(masks) == 6 and len(read(source, image_column="mask", skip_bad=True)) == 5
