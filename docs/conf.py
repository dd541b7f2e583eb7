"""How Sphinx makes a site of docs/: `make docs`. A warning is an error there.

Nothing of the package is imported: the reference is written by scripts/checks/reference_pages.py.
"""

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "scalecom_hvd"

project = "scalecom_hvd"
author = "scalecom_hvd contributors"
release = version = re.search(r'__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text())[1]
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes = False  # a reader copies what stands in quotes

# What is copied of an example is what a reader types.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"scalecom_hvd {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False
