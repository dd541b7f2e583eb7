"""The pages' examples: the blocks of Python in README.md and docs/*.md.

A comment in the page, `<!-- run with: torch -->`, says which names are defined when the blocks
after it are run: those that a reader's own script defines before them. Blocks up to the next such
comment are one script.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
KINDS = (
    "torch",  # a model and an optimizer
    "torch, training",  # the optimizer is already a DistributedOptimizer
    "stock",  # the same as torch, without `hvd`
    "torch script",  # a whole script: no names are given to it
    "torch nodes",
    "ddp",
    "ddp nodes",  # additionally the numbers of nodes and of ranks per node
    "ddp pipeline",  # a stage's module, and what its schedule needs
    "ddp script",
    "keras",
    "keras script",
    "tensorflow",
    "methods",  # one process
    "not run",
)


@dataclass(frozen=True)
class Example:
    """Blocks that are one script.

    name: the page's name, and the line of the comment.  kind: one of KINDS.  code: the blocks, with
    empty lines before them, so that errors name the page's own lines.
    """

    name: str
    kind: str
    code: str

    def run(self, scope):
        """Run the script with the names in `scope`. The script may change them."""
        exec(compile(self.code, self.name, "exec"), scope)

    def shorter(self, number, instead):
        """Return the same example with a number in its code replaced by a smaller one."""
        assert number in self.code
        return dataclasses.replace(self, code=self.code.replace(number, instead))


def examples(*kinds):
    """All examples of these kinds, in the order of the pages."""
    return [example for page in PAGES for example in examples_of(page) if example.kind in kinds]


def examples_of(page):
    """A page's examples, of any kind."""
    text, found = page.read_text(), []
    for comment in re.finditer(
        r"^<!-- run with: (.*) -->\n((?:(?!<!-- run with: ).*\n)*)", text, re.M
    ):
        code = ""
        for block in re.finditer(r"^```python\n(.*?)^```", comment[2], re.M | re.S):
            before = text.count("\n", 0, comment.start(2) + block.start(1))
            code += "\n" * (before - code.count("\n")) + block[1]
        line = text.count("\n", 0, comment.start()) + 1
        found.append(Example(f"{page.name}:{line}", comment[1], code))
    return found
