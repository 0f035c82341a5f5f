"""The command that draws attention patterns."""

import numpy as np
import pytest
from PIL import Image

from transformers_jax.cli import main
from transformers_jax.nn import parse_pattern
from transformers_jax.patterns import as_picture, as_text


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["patterns", *arguments])
    out, error = capsys.readouterr()
    return ended.value.code, out, error


def test_text_and_picture(capsys, tmp_path):
    path = tmp_path / "patterns.png"
    code, out, _ = run(capsys, "causal & local(1)", "global(1)", "--length", "4", "--output", str(path))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "causal & local(window=1): 1.8 keys a query, 43.8% of all; causal; looks back 1 at most"
    assert lines[1:5] == ["█···", "██··", "·██·", "··██"]
    assert lines[6].startswith("global(tokens=1): 1.8 keys") and lines[7:11] == ["████", "█···", "█···", "█···"]
    with Image.open(path) as picture:
        assert picture.format == "PNG" and picture.width > picture.height


def test_long_sequences_are_shaded_by_how_much_is_seen():
    drawn = as_text(parse_pattern("causal"), 100, 10).splitlines()
    assert len(drawn) == 10 and drawn[0] == "▓" + "·" * 9 and drawn[9] == "█" * 9 + "▓"
    assert as_text(parse_pattern("full"), 7, 3).splitlines() == ["███"] * 3  # 3 does not divide 7


def test_pixels_are_the_mask():
    pattern = parse_pattern("local(1) | global(1)")
    pixels = np.asarray(as_picture([pattern], 6))
    from transformers_jax.patterns import CELL, MARGIN, SEEN

    inside = pixels[2 * MARGIN + CELL // 2 :: CELL, MARGIN + CELL // 2 :: CELL][:6, :6]
    np.testing.assert_array_equal((inside == SEEN).all(axis=-1), pattern.mask(6, 6))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no pattern is given"),
        (["locl(3)"], "'locl(3)' is no attention pattern"),
        (["global(30)"], "place 29 is outside of a sequence of 24"),
        (["causal", "--length", "0"], "--length 0 and --width 64 must be at least 1"),
        (["causal", "--output", "nowhere/x.png"], "nowhere/x.png"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, said):
    code, _, error = run(capsys, *arguments)
    assert code == 2 and said in error and error.count("\n") == 1


def test_blind_queries_are_told(capsys):
    _, out, _ = run(capsys, "random(1, 24, block=4) & causal")
    assert "queries see nothing" in out
