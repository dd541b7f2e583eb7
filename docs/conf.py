"""How Sphinx makes a site of docs/: `make docs`. A warning is an error there.

The API page is made of docstrings. The frameworks are mocked, so they need not be installed.
"""

import re
import sys
from pathlib import Path

from sphinx.ext.autodoc.mock import _MockObject

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "scalecom_hvd"
author = "scalecom_hvd contributors"
init = (ROOT / "scalecom_hvd" / "__init__.py").read_text()
release = version = re.search(r'__version__ = "(.+)"', init)[1]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
default_role = "code"
maximum_signature_line_length = 80
smartquotes = False  # a reader copies what stands in quotes

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_mock_imports = ["horovod", "numpy", "tensorflow", "torch", "triton"]
_MockObject.__or__ = _MockObject.__ror__ = lambda mock, other: mock  # int | torch.Tensor
_attribute = _MockObject.__getattr__


def _attribute_of_mock(mock, name):
    if name in ("__signature__", "__wrapped__"):  # what `inspect` looks for
        raise AttributeError(name)
    return _attribute(mock, name)


_MockObject.__getattr__ = _attribute_of_mock
autodoc_typehints = "none"  # docstrings say what arguments are
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_param = False  # "a, b: ..." is about two arguments
napoleon_custom_sections = ["Returns"]  # a sentence, which may hold a colon: no type before it

# What is copied of an example is what a reader types.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"scalecom_hvd {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_copyright = False


def setup(app):
    """Show defaults in signatures as numbers, and by public names."""

    def process_signature(app, what, name, thing, options, signature, returns):
        if not signature:
            return None
        block = getattr(sys.modules[thing.__module__], "BLOCK", None)
        signature = signature.replace("_horovod_tensorflow.", "horovod.")
        return signature.replace("=BLOCK", f"={block}"), returns

    app.connect("autodoc-process-signature", process_signature)
