"""What run_tests.py says of a part that failed."""

import run_tests


def test_what_failed_or_hangs_is_read_from_the_diary(tmp_path):
    path = tmp_path / "diary"
    assert run_tests.failed_tests(path) == []
    one, two = "tests/a.py::one[x - y]", "tests/a.py::two"
    path.write_text(f"began {one}\nbegan {one}\nended {one}\nended {one}\nbegan {two}\n")
    assert run_tests.failed_tests(path) == [two]
    with path.open("a") as more:
        more.write(f"failed {one}\nfailed {one}\n")
    assert run_tests.failed_tests(path) == [one]
