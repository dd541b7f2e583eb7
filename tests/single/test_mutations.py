"""The code that mutations.py changes still exists in the package, and the result is valid code."""

import ast

import diary
import mutations


def test_each_mutation_is_of_the_code_as_it_is():
    found = mutations.mutations()
    assert len({mutation.name for mutation in found}) == len(found) >= 40
    for mutation in found:
        text = mutation.applied(mutations.ROOT)
        if mutation.file.endswith(".py"):
            ast.parse(text)


def test_what_failed_or_hangs_is_read_from_the_diary(tmp_path):
    path = tmp_path / "diary"
    assert diary.failed_tests(path) == []
    one, two = "tests/a.py::one[x - y]", "tests/a.py::two"
    path.write_text(f"began {one}\nbegan {one}\nended {one}\nended {one}\nbegan {two}\n")
    assert diary.failed_tests(path) == [two]
    with path.open("a") as more:
        more.write(f"failed {one}\nfailed {one}\n")
    assert diary.failed_tests(path) == [one]
