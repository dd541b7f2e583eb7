"""How Sphinx makes pages of docs/: `make docs`. A warning is an error there."""

from scalecom_hvd import __version__

project = "scalecom_hvd"
author = "scalecom_hvd contributors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = False  # docstrings name Horovod's, PyTorch's and TensorFlow's classes

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings are plain text: `x` is code.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures and docstrings say it, and once is enough
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Returns"]  # prose, in which a colon ends no type

html_theme = "furo"
html_title = f"scalecom_hvd {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False
